"""The reference engine and trainer below NeMo RL's own loop, on machines without a GPU.

Only what a Ray worker of NeMo RL does is stood in for. Loop, collector, buffer, worker
groups and the facades are NeMo RL's.
"""
