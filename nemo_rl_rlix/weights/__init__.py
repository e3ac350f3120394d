"""The CPU weight cache and the way from it to chosen shards."""
