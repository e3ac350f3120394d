"""Inference shards: who may serve, who decides, and how one is taken or brought back."""
