"""The training side on Megatron-Core: weight cache, offload, communicators."""
