"""Worker extension of NeMo RL's engines in a time-shared run. Runs in vLLM's processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.vllm.extension import ShardExtension
from nemo_rl_rlix.vllm.ipc import ipc_address
from nemo_rl_rlix.weights.transports.staged import Named

LIFECYCLE = "_weight_update_lifecycle"
_HAS_LIFECYCLE = LIFECYCLE in vars(VllmInternalWorkerExtension)
"""Main has it, v0.7.0 does not."""


class RlixVllmExtension(ShardExtension, VllmInternalWorkerExtension):
    """NeMo RL's loading and update lifecycle behind this package's transports."""

    def rlix_has_lifecycle(self) -> bool:
        """Whether quantised weights and draft models are made anew after an update."""
        return _HAS_LIFECYCLE

    def rlix_draft_from_disk(self) -> bool:
        """Whether the MTP draft layers were read from disk, once."""
        return bool(getattr(self, "_mtp_drafter_from_disk", False))

    def rlix_load(self, weights: list[Named]) -> None:
        """NeMo RL's loader: renames, quantises, and feeds draft models."""
        self._load_weights(weights)

    @contextlib.contextmanager
    def rlix_lifecycle(self, transport: str) -> Iterator[Callable[[], None]]:
        """NeMo RL's lifecycle, which does not depend on the transport's bytes.

        Host memory counts as ``ipc`` there: tensors arrive in batches, all complete.
        """
        if not _HAS_LIFECYCLE:
            with super().rlix_lifecycle(transport) as finalize:
                yield finalize
            return
        known = "collective" if transport == "collective" else "ipc"
        with self._weight_update_lifecycle(known) as finalize:
            yield finalize

    def get_zmq_address(self) -> str:
        """Socket of this pipeline on this GPU."""
        return ipc_address(self._rlix().config.pipeline_id, self.report_device_id())

    def rlix_stream_ipc(self) -> frozenset[str]:
        """Receive from NeMo RL's own sender; it finalizes by itself.

        Raises:
            RLixError: It reported a failure, of which the log has the details.
        """
        names = frozenset(self.state_dict_info)
        if not self.update_weights_via_ipc_zmq():
            raise RLixError("NeMo RL's CUDA-IPC update failed; see the worker's log")
        return names
