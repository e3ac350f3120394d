"""Typed errors. Every one survives pickling, since most cross a Ray boundary."""

from __future__ import annotations

from dataclasses import dataclass, field


class RLixError(Exception):
    """Base of every error that this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the attributes, not from the formatted message."""
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[RLixError], args: tuple[object, ...], state: dict[str, object]) -> RLixError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class SettingError(RLixError):
    """A setting cannot work.

    Args:
        setting: Dotted name of the setting, as the user writes it.
        value: The value that was given.
        reason: Why it cannot work.
        remedy: What to write or do instead.
    """

    def __init__(self, setting: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{setting}={value!r}: {reason}. {remedy}")
        self.setting = setting
        self.value = value
        self.reason = reason
        self.remedy = remedy


class HostMemoryError(SettingError):
    """The host cannot hold what the settings ask it to hold."""


class IllegalTransitionError(RLixError):
    """A shard was asked to enter a state that does not follow from its own."""

    def __init__(self, dp_rank: int, current: str, wanted: str) -> None:
        super().__init__(f"shard {dp_rank}: {current} -> {wanted} is not a legal transition")
        self.dp_rank = dp_rank
        self.current = current
        self.wanted = wanted


class DeadlineExceededError(RLixError):
    """Something did not answer in time.

    Args:
        what: The act that was waited for, with the rank or name it concerns.
        timeout_s: The deadline in seconds.
        detail: What was seen last, if anything.
    """

    def __init__(self, what: str, timeout_s: float, detail: str = "") -> None:
        tail = f" ({detail})" if detail else ""
        super().__init__(f"{what} did not end within {timeout_s:g} s{tail}")
        self.what = what
        self.timeout_s = timeout_s
        self.detail = detail


@dataclass(frozen=True)
class Segment:
    """A run of tokens that was sampled from one version of the weights.

    Attributes:
        weights_version: Version that the tokens were sampled from.
        num_tokens: Length of the run.
    """

    weights_version: int
    num_tokens: int


@dataclass(frozen=True)
class PartialGeneration:
    """What a request had produced when its shard was taken.

    Attributes:
        token_ids: Tokens sampled so far, prompt excluded.
        logprobs: Natural-log probability of each token, same length.
        segments: Versions the tokens came from, in order; lengths sum to ``len(token_ids)``.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    segments: tuple[Segment, ...] = field(default=())


class ShardPreemptedError(RLixError):
    """The shard stopped serving; the request must be dispatched again.

    Never a failure of the request: it is raised for a request that meets a
    closed gate and for one that was aborted while it ran.

    Args:
        dp_rank: Rank of the shard.
        partial: Tokens produced before the abort, empty if none.
        epoch: Routing epoch at which the shard closed, -1 if unknown.
    """

    def __init__(
        self, dp_rank: int, partial: PartialGeneration | None = None, epoch: int = -1
    ) -> None:
        super().__init__(f"shard {dp_rank} was preempted")
        self.dp_rank = dp_rank
        self.partial = partial or PartialGeneration()
        self.epoch = epoch


class ShardFailedError(RLixError):
    """A shard cannot serve until it is rebuilt."""

    def __init__(self, dp_rank: int, cause: str) -> None:
        super().__init__(f"shard {dp_rank} failed: {cause}")
        self.dp_rank = dp_rank
        self.cause = cause


class NoLiveShardError(RLixError):
    """No shard is active and nothing suggests that one ever will be."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"no inference shard can serve this request: {cause}")
        self.cause = cause


class CoverageError(RLixError):
    """A sync did not bring exactly the tensors that the engine expects."""

    def __init__(self, dp_rank: int, missing: list[str], unexpected: list[str]) -> None:
        super().__init__(
            f"shard {dp_rank}: weight sync incomplete; missing {sorted(missing)[:8]}"
            f" ({len(missing)}), unexpected {sorted(unexpected)[:8]} ({len(unexpected)})"
        )
        self.dp_rank = dp_rank
        self.missing = sorted(missing)
        self.unexpected = sorted(unexpected)


class CacheNotReadyError(RLixError):
    """There is no complete weight cache to sync from."""


class GrantRequiredError(RLixError):
    """A GPU was used without a grant of the scheduler."""

    def __init__(self, owner: str, gpus: list[int], act: str) -> None:
        super().__init__(f"{owner} may not {act}: GPUs {gpus} are not granted to it")
        self.owner = owner
        self.gpus = gpus
        self.act = act


class ControlPlaneLostError(RLixError):
    """The scheduler or the coordinator is gone."""


class PipelineClosedError(RLixError):
    """The pipeline was unregistered or is shutting down."""


class UnsupportedVersionError(RLixError):
    """Software that this package binds to is not one that it knows.

    Args:
        product: ``NeMo RL`` or ``vLLM``.
        version: Version that was found.
        places: ``(file, symbol, reason)`` of everything that is not as expected.
        remedy: What to install instead.
    """

    def __init__(
        self, product: str, version: str, *, places: list[tuple[str, str, str]], remedy: str
    ) -> None:
        lines = "".join(f"\n  {file}: {symbol}: {reason}" for file, symbol, reason in places)
        super().__init__(f"{product} {version} cannot be time-shared:{lines}\n{remedy}")
        self.product = product
        self.version = version
        self.places = places
        self.remedy = remedy
