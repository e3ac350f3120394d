"""Names under which a pipeline's actors are found, none shared with another pipeline."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from nemo_rl_rlix.control_plane.protocol import coordinator_name, pipeline_namespace


def new_pipeline_id(name: str | None = None) -> str:
    """Make an id that no other run has.

    Args:
        name: Readable part; characters that an id cannot have become ``_``.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name or "pipeline")[:64]
    return f"{readable}_{secrets.token_hex(6)}"


@dataclass(frozen=True)
class PipelineNames:
    """Ray namespace and actor names of one pipeline.

    Every actor that holds GPU memory should have such a name: it is how the control
    plane finds and ends what a failed pipeline leaves behind.

    Attributes:
        pipeline_id: The pipeline.
    """

    pipeline_id: str

    @property
    def namespace(self) -> str:
        """Ray namespace of all its named actors."""
        return pipeline_namespace(self.pipeline_id)

    @property
    def coordinator(self) -> str:
        """Name of its coordinator."""
        return coordinator_name(self.pipeline_id)

    def actor(self, kind: str, rank: int | None = None) -> str:
        """Name of another actor, e.g. ``rlix:shard:{pipeline_id}:0``."""
        tail = "" if rank is None else f":{rank}"
        return f"rlix:{kind}:{self.pipeline_id}{tail}"

    def options(self, kind: str, rank: int | None = None) -> dict[str, str]:
        """Name and namespace, for ``.options(...)`` of a Ray actor."""
        return {"name": self.actor(kind, rank), "namespace": self.namespace}
