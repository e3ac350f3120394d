"""A writer and two readers in processes of their own, over both kinds of memory."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import weight_processes
from weight_processes import digest, weights

CONTEXT = multiprocessing.get_context("spawn")
WAIT_S = 60


class Peer:
    """A process and the pipe to it."""

    def __init__(self, target: object, *args: object) -> None:
        self.pipe: Connection
        self.pipe, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(
            target=target,  # type: ignore[arg-type]
            args=(theirs, *args),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def ask(self, message: object) -> object:
        self.pipe.send(message)
        assert self.pipe.poll(WAIT_S), "no answer"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Peer]]:
    peers = [Peer(weight_processes.read) for _ in range(2)]
    yield peers
    for peer in peers:
        peer.end()


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_two_readers_see_what_the_writer_built_and_refuse_what_it_left(
    kind: str, readers: list[Peer], tmp_path: Path
) -> None:
    directory = str(tmp_path) if kind == "file" else None
    writer = Peer(weight_processes.write, directory)
    try:
        for version in range(3):
            handle = writer.ask(("build", version, version % 2))
            assert [reader.ask(handle) for reader in readers] == [digest(weights(version))] * 2
        newest = handle
        older = writer.ask(("build", 1, 1))

        # The writer is killed in the middle of a build of slot 0: the readers,
        # which have it mapped, must not take what is there for a set of weights.
        writer.pipe.send(("die", 9, 0))
        writer.process.join(WAIT_S)
        assert writer.process.exitcode == -9
        assert [reader.ask(newest) for reader in readers] == ["TornReadError"] * 2
        # The other slot was complete, and a mapping outlives its maker.
        assert [reader.ask(older) for reader in readers] == [digest(weights(1))] * 2

        # A reader that has not mapped it: a memfd is gone with its process, a
        # file is not, and says itself that it is not complete.
        fresh = Peer(weight_processes.read)
        try:
            wanted = "StaleHandleError" if kind == "memfd" else "TornReadError"
            assert fresh.ask(newest) == wanted
        finally:
            fresh.end()
    finally:
        writer.end()


def test_a_file_is_removed_when_its_writer_closes(tmp_path: Path) -> None:
    writer = Peer(weight_processes.write, str(tmp_path))
    try:
        writer.ask(("build", 0, 0))
        assert len(list(tmp_path.iterdir())) == 2
        assert writer.ask(("close", 0, 0)) == "closed"
        writer.process.join(WAIT_S)
        assert list(tmp_path.iterdir()) == []
    finally:
        writer.end()
