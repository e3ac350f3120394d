"""Schedulers, the adapter to each, and the coordinator they talk to."""
