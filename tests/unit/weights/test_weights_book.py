"""The lease book: who waits for whom, what a failed build leaves."""

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_rl_rlix.errors import CacheNotReadyError, DeadlineExceededError
from nemo_rl_rlix.weights.book import CacheBook, SlotUse, choose_slot, version_follows
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.types import BucketLayout, CacheHandle, SharedMemoryHandle

LAYOUT = BucketLayout((), (), (), (), 0)


def handle(version: int, slot: int) -> CacheHandle:
    memory = SharedMemoryHandle("/nowhere", 0, "00", "n")
    return CacheHandle("p", version, slot, LAYOUT, memory, "")


def publish(book: CacheBook, version: int) -> int:
    slot = book.begin_build(1.0)
    book.commit(handle(version, slot))
    return slot


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ([SlotUse(0, False)], 0),
        ([SlotUse(0, True)], 0),
        ([SlotUse(1, True)], None),
        ([SlotUse(1, False)], None),
        ([SlotUse(0, True), SlotUse(0, False)], 1),
        ([SlotUse(0, False), SlotUse(5, True)], 0),
        # An old reader holds the spare slot: wait for it, keep the published one.
        ([SlotUse(0, True), SlotUse(1, False)], None),
        ([SlotUse(0, False), SlotUse(0, False)], 0),
        ([SlotUse(1, False), SlotUse(0, False)], 1),
    ],
)
def test_slot_choice(slots: list[SlotUse], chosen: int | None) -> None:
    assert choose_slot(slots) == chosen


@pytest.mark.parametrize(
    ("version", "newest", "published", "ok"),
    [
        (0, -1, False, True),
        (5, 4, True, True),
        (4, 4, True, False),
        (4, 4, False, True),
        (3, 4, False, False),
    ],
)
def test_version_order(version: int, newest: int, published: bool, ok: bool) -> None:
    assert version_follows(version, newest, published=published) is ok


def test_nothing_to_read_before_the_first_commit() -> None:
    book = CacheBook(2)
    assert book.cache_ready_step == -1
    with pytest.raises(CacheNotReadyError), book.lease():
        pass
    slot = book.begin_build(1.0)
    with pytest.raises(CacheNotReadyError, match="a build runs"), book.lease():
        pass
    book.commit(handle(0, slot))
    assert book.cache_ready_step == 0
    with book.lease() as held:
        assert held.weights_version == 0


def test_two_slots_let_readers_go_on_during_a_build() -> None:
    book = CacheBook(2)
    first = publish(book, 1)
    with book.lease() as old:
        slot = book.begin_build(0.01)
        assert slot != first
        with book.lease() as other:
            assert other == old
        book.commit(handle(2, slot))
        with book.lease() as new:
            assert new.weights_version == 2
        with pytest.raises(DeadlineExceededError, match="slot of the weight cache"):
            book.begin_build(0.02)
    assert book.begin_build(0.02) == first


def test_one_slot_builds_only_when_its_readers_are_done() -> None:
    book = CacheBook(1)
    publish(book, 1)
    order: list[str] = []

    def build() -> None:
        slot = book.begin_build(5.0)
        order.append("build")
        book.commit(handle(2, slot))

    with book.lease() as held:
        thread = threading.Thread(target=build)
        thread.start()
        time.sleep(0.05)
        assert held.weights_version == 1
        order.append("reader done")
    thread.join(5.0)
    assert order == ["reader done", "build"]
    assert book.cache_ready_step == 2


def test_new_readers_do_not_starve_a_waiting_build() -> None:
    book = CacheBook(1)
    publish(book, 1)
    built = threading.Event()

    def build() -> None:
        slot = book.begin_build(5.0)
        book.commit(handle(2, slot))
        built.set()

    with book.lease():
        threading.Thread(target=build, daemon=True).start()
        time.sleep(0.05)
        with pytest.raises(CacheNotReadyError), book.lease():
            pass
    with book.lease(timeout_s=5.0) as held:
        assert held.weights_version == 2
    assert built.wait(5.0)


def test_a_build_that_gives_up_waiting_leaves_the_cache_as_it_was() -> None:
    book = CacheBook(1)
    publish(book, 1)
    with book.lease(), pytest.raises(DeadlineExceededError):
        book.begin_build(0.01)
    with book.lease() as held:
        assert held.weights_version == 1


@pytest.mark.parametrize(("slots", "left"), [(1, -1), (2, 1)])
def test_what_a_failed_build_leaves(slots: int, left: int) -> None:
    book = CacheBook(slots)
    publish(book, 1)
    slot = book.begin_build(1.0)
    book.abort(slot)
    book.abort(slot)
    assert book.cache_ready_step == left
    if left < 0:
        with pytest.raises(CacheNotReadyError), book.lease():
            pass
    # Where the snapshot of version 1 is lost, it may be taken again.
    again = 1 if slots == 1 else 2
    publish(book, again)
    assert book.cache_ready_step == again


def test_a_version_that_does_not_follow_is_not_published() -> None:
    book = CacheBook(2)
    publish(book, 3)
    slot = book.begin_build(1.0)
    with pytest.raises(VersionOrderError):
        book.commit(handle(3, slot))
    assert book.cache_ready_step == 3
    assert publish(book, 4) == slot


def test_only_the_slot_that_is_being_built_can_be_committed() -> None:
    book = CacheBook(2)
    slot = book.begin_build(1.0)
    with pytest.raises(VersionOrderError, match="not being built"):
        book.commit(handle(1, 1 - slot))
    book.abort(slot)
    with pytest.raises(VersionOrderError, match="not being built"):
        book.commit(handle(1, slot))


def test_a_waiting_reader_gets_the_version_that_is_published_meanwhile() -> None:
    book = CacheBook(2)
    slot = book.begin_build(1.0)
    timer = threading.Timer(0.05, book.commit, [handle(0, slot)])
    timer.start()
    with book.lease(timeout_s=5.0) as held:
        assert held.weights_version == 0
    timer.join()


def test_one_build_at_a_time() -> None:
    book = CacheBook(2)
    book.begin_build(1.0)
    with pytest.raises(DeadlineExceededError):
        book.begin_build(0.02)


def test_after_invalidation_nothing_can_be_read_until_the_next_commit() -> None:
    book = CacheBook(2)
    publish(book, 1)
    with book.lease():
        book.invalidate()
    with pytest.raises(CacheNotReadyError), book.lease():
        pass
    publish(book, 1)
    assert book.cache_ready_step == 1


class BookMachine(RuleBasedStateMachine):
    """Any order of calls: a slot is never written while somebody reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CacheBook(2)
        self.leases: list[tuple[object, CacheHandle]] = []
        self.building: int | None = None
        self.version = 0
        self.readable: CacheHandle | None = None

    @rule()
    def begin(self) -> None:
        try:
            slot = self.book.begin_build(0.0)
        except DeadlineExceededError:
            held = {held.slot for _, held in self.leases}
            published = self.readable.slot if self.readable else None
            assert self.building is not None or {0, 1} - {published} <= held
            return
        assert self.building is None
        assert all(held.slot != slot for _, held in self.leases)
        assert self.readable is None or self.readable.slot != slot
        self.building = slot

    @precondition(lambda self: self.building is not None)
    @rule()
    def commit(self) -> None:
        self.version += 1
        assert self.building is not None
        self.readable = handle(self.version, self.building)
        self.book.commit(self.readable)
        self.building = None

    @precondition(lambda self: self.building is not None)
    @rule()
    def abort(self) -> None:
        assert self.building is not None
        self.book.abort(self.building)
        self.building = None

    @rule()
    def lease(self) -> None:
        context = self.book.lease()
        try:
            held = context.__enter__()
        except CacheNotReadyError:
            assert self.readable is None
            return
        assert held == self.readable
        self.leases.append((context, held))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 100))
    def end_lease(self, pick: int) -> None:
        context, _ = self.leases.pop(pick % len(self.leases))
        context.__exit__(None, None, None)  # type: ignore[attr-defined]

    @invariant()
    def step_is_the_readable_one(self) -> None:
        assert self.book.cache_ready_step == (
            self.readable.weights_version if self.readable else -1
        )


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
