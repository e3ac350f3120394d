"""The worker extension on a CPU engine. Imported in its process only."""

from __future__ import annotations

import os
import pickle

import vllm._custom_ops as ops

from nemo_rl_rlix.vllm.extension import ShardExtension

# oneDNN packs weights at load and frees the originals, so that none can be loaded later.
ops._supports_onednn = False


class CpuExtension(ShardExtension):
    def rlix_pid(self, payload: bytes) -> bytes:
        return pickle.dumps(os.getpid())
