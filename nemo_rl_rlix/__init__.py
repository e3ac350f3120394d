"""GPU time-sharing for NeMo RL async GRPO pipelines.

Importing this package imports neither torch nor ray: everything heavy lies in
subpackages that are imported where they are used.
"""

__version__ = "0.1.0"
