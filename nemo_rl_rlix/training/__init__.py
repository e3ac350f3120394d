"""Where a training loop meets the scheduler: hooks, progress, weight hand-over."""
