"""A small async-GRPO pipeline on the CPU, behind the same protocols as the GPU one."""
