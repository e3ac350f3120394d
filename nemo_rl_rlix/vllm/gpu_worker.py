"""The worker class of an engine that shares its card.

Imported by name in vLLM's worker processes, never elsewhere: it needs vLLM.
"""

from __future__ import annotations

import logging

import torch
from vllm.v1.worker.gpu_worker import Worker

from nemo_rl_rlix.shards.protocol import MEMORY_TAGS, WEIGHTS_TAG
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.weight_state import stray_tensors

logger = logging.getLogger(__name__)

compat.require(compat.WORKER_SYMBOLS)


class ShardGpuWorker(Worker):
    """A worker whose sleep does not depend on what other processes of the card do.

    vLLM compares the free memory of the whole card before and after, as the last act of
    a sleep, and fails when a neighbour has grown meanwhile. By then the memory is
    unmapped, the executor believes that the engine is awake, and the next request steps
    on it.
    """

    _rlix_unmapped: frozenset[str] = frozenset()
    _rlix_saved_strays: dict[str, torch.Tensor] | None = None

    @property
    def rlix_unmapped_tags(self) -> frozenset[str]:
        """Tags whose memory is not there."""
        return self._rlix_unmapped

    def sleep(self, level: int = 1) -> None:
        """Unmap; on return everything is unmapped, after an error nothing is known good.

        Raises:
            RuntimeError: The memory could not be unmapped. The process has to be ended.
        """
        if self._rlix_unmapped:
            return
        if level > 1:
            # Level 2 discards what no sync brings back; vLLM itself saves buffers.
            self._rlix_saved_strays = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in self._strays().items()
            }
        tags = frozenset(compat.pool_bytes_by_tag()) | frozenset(MEMORY_TAGS)
        try:
            super().sleep(level)
        except AssertionError as error:
            if "Memory usage increased" not in str(error):
                raise RuntimeError("the sleep of this process failed half way") from error
            logger.info("slept while a neighbour of the card took memory")
        self._rlix_unmapped = tags

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Map again; what a level-2 sleep would have lost is put back with the weights."""
        super().wake_up(tags)
        woken = frozenset(tags) if tags is not None else self._rlix_unmapped
        self._rlix_unmapped -= woken
        if not self._rlix_unmapped & frozenset(MEMORY_TAGS):
            self._rlix_unmapped = frozenset()
        if self._rlix_saved_strays is not None and WEIGHTS_TAG in woken:
            strays = self._strays()
            for name, saved in self._rlix_saved_strays.items():
                strays[name].copy_(saved)
            self._rlix_saved_strays = None

    def _strays(self) -> dict[str, torch.Tensor]:
        return stray_tensors(self.model_runner.model, compat.pool_ranges(WEIGHTS_TAG))
