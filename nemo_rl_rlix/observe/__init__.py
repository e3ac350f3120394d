"""Traces, pictures and figures of a run."""
