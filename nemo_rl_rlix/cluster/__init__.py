"""Shared placement groups: which logical GPU is which bundle on which node."""
