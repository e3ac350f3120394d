"""Inference shards that are vLLM engines.

The modules work over an ``AsyncLLM``-like handle and know nothing of NeMo RL; its worker
classes are mixed in by ``nemo_rl_rlix.nemo_rl.vllm_workers`` and ``vllm_extension``.
"""
