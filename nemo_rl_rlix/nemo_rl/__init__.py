"""The binding to NeMo RL: registration at run time, and the differences between its versions.

The only folder that imports ``nemo_rl``, and only in the modules that run inside a
process that has imported it already. Nothing of NeMo RL is edited.
"""
