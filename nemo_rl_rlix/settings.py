"""The ``rlix:`` block of a recipe: every setting, with its unit and default."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_rlix.errors import SettingError

Seconds = Annotated[float, Field(gt=0)]
MIB = 1024 * 1024


class ControlPlaneKind(StrEnum):
    """Which scheduler decides: RLix where it is found, else the embedded one."""

    AUTO = "auto"
    EMBEDDED = "embedded"
    RLIX = "rlix"


class PreemptedRequests(StrEnum):
    """What happens to a request whose shard is taken."""

    RESTART = "restart"
    RESUME = "resume"


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Deadlines(_Block):
    """Deadlines in seconds. Every remote call has one of them."""

    drain_s: Seconds = Field(10.0, description="Abort until the engine's table is empty.")
    sleep_s: Seconds = Field(20.0, description="Engine sleep, memory acknowledgement included.")
    wake_s: Seconds = Field(20.0, description="Mapping of one memory tag.")
    receive_s: Seconds = Field(120.0, description="Copy and load of one set of weights.")
    finalize_s: Seconds = Field(60.0, description="Post-load work of an engine.")
    probe_s: Seconds = Field(15.0, description="One-token generation that proves a shard serves.")
    control_s: Seconds = Field(10.0, description="Gate, pause and resume calls.")
    build_s: Seconds = Field(600.0, description="Start of an engine or a trainer process.")
    kill_s: Seconds = Field(15.0, description="End of a process and return of its memory.")
    cache_build_s: Seconds = Field(300.0, description="Snapshot of the weights into the cache.")
    offload_s: Seconds = Field(120.0, description="Offload or onload of the trainer.")
    resize_s: Seconds = Field(
        150.0, description="A whole resize; what is not done by then is failed and killed."
    )
    grant_s: Seconds = Field(
        3600.0, description="Wait for training GPUs; other pipelines may hold them for long."
    )


class RoutingSettings(_Block):
    """How requests find a shard and how long they may wait for one."""

    preempted_requests: PreemptedRequests = Field(
        PreemptedRequests.RESUME,
        description="restart: from the prompt; resume: from the tokens sampled so far.",
    )
    long_poll_s: Seconds = Field(5.0, description="Longest wait of one poll of the shard states.")
    liveness_s: Seconds = Field(
        60.0,
        description="Without a heartbeat of the coordinator for this long, waiting requests fail.",
    )
    max_in_flight_per_shard: int | None = Field(
        None,
        ge=1,
        description="Most requests that one process sends to a shard at once; the rest wait in"
        " its router, so that a shard that arrives later takes its share. Unset: any number.",
    )
    redispatch_backoff_s: Seconds = Field(
        0.02, description="Pause after a refused dispatch when the routing state has not moved."
    )


class WeightCacheSettings(_Block):
    """The CPU weight cache."""

    bucket_mib: int = Field(512, ge=1, description="Bucket size in MiB.")
    alignment_bytes: int = Field(256, ge=1, description="Alignment of tensors in a bucket, bytes.")
    slots: int = Field(
        2,
        ge=1,
        le=2,
        description="1: a build waits for readers; 2: it does not, at twice the memory.",
    )
    directory: str | None = Field(
        None, description="Directory for the shared file; unset: an anonymous memfd."
    )
    host_memory_fraction: float = Field(
        0.8, gt=0, le=1, description="Share of the cgroup's memory limit that may be in use."
    )


class RLixSettings(_Block):
    """The ``rlix:`` block. Every field is optional.

    An unknown field is refused, so that a typing error does not pass for a setting.
    """

    control_plane: ControlPlaneKind = Field(
        ControlPlaneKind.AUTO, description="Scheduler: auto, embedded or rlix."
    )
    pipeline_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Readable part of the pipeline id; a random suffix keeps it unique.",
    )
    train_device_mapping: tuple[int, ...] | None = Field(
        None, description="Logical GPU ids of the trainer; unset: derived from the recipe."
    )
    infer_device_mapping: tuple[int, ...] | None = Field(
        None, description="Logical GPU ids of the inference shards; unset: derived."
    )
    allow_shrink_to_zero: bool = Field(
        False,
        description="Permit training to take every inference shard; generation then stands still.",
    )
    sleep_level: int = Field(
        2, ge=1, le=2, description="1 keeps weights in host memory, 2 discards them."
    )
    sleeping_memory_mib: int = Field(
        1536, ge=0, description="MiB of device memory that a sleeping shard may keep per GPU."
    )
    priority_weight: float = Field(
        1.0, gt=0, description="Multiplies this pipeline's demand in the generation shares."
    )
    heartbeat_s: Seconds = Field(
        2.0, description="Interval of heartbeats; a pipeline silent for five of them is ended."
    )
    deadlines: Deadlines = Field(default_factory=Deadlines)
    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    weight_cache: WeightCacheSettings = Field(default_factory=WeightCacheSettings)
    trace_dir: str | None = Field(
        None, description="Directory for Perfetto traces; unset: no trace is written."
    )

    @classmethod
    def from_recipe(cls, block: dict[str, Any] | None) -> RLixSettings:
        """Validate the ``rlix:`` block of a recipe.

        Args:
            block: The block as plain data, or ``None`` when the recipe has none.

        Raises:
            SettingError: Names the first setting that cannot be accepted.
        """
        try:
            return cls.model_validate({} if block is None else block)
        except ValidationError as error:
            first = error.errors()[0]
            setting = ".".join(["rlix", *(str(part) for part in first["loc"])])
            known = ", ".join(_fields_beside(cls, first["loc"]))
            remedy = (
                f"Remove it, or use one of: {known}"
                if first["type"] == "extra_forbidden"
                else "See docs for the type, the unit and the range of this setting"
            )
            raise SettingError(setting, first.get("input"), first["msg"], remedy) from error


def _fields_beside(block: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Names of the settings of the block in which ``loc`` lies."""
    for part in loc[:-1]:
        annotation = block.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        block = annotation
    return list(block.model_fields)
