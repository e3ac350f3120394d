"""NeMo RL's worker extension on a CPU engine. Imported in its process only."""

from __future__ import annotations

import vllm._custom_ops as ops

from nemo_rl_rlix.nemo_rl.vllm_extension import RlixVllmExtension

# oneDNN packs weights at load and frees the originals, so that none can be loaded later.
ops._supports_onednn = False


class CpuNemoExtension(RlixVllmExtension):
    pass
