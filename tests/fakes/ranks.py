"""Runs a function as the ranks of a gloo world, each a process of its own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: by a value, an error, or neither (killed, or out of time)."""

    rank: int
    value: Any = None
    error: str = ""
    ended: bool = False


def preload(*modules: str) -> None:
    """Import modules once, in the server that ranks are forked from.

    The first call starts the server; it imports nothing that a later call names.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # 3.11 passes on no path
    try:
        _context.set_forkserver_preload(list(modules))
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def run_ranks(
    program: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> list[Outcome]:
    """Run ``program(rank, world_size, *args)`` in every rank, in a gloo world.

    Ranks that are not done after ``timeout_s`` are killed.
    """
    port = _free_port()
    pipes: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main, args=(theirs, program, rank, world_size, port, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    outcomes = [Outcome(rank) for rank in range(world_size)]
    end = time.monotonic() + timeout_s
    while pipes and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                value, error = pipe.recv()
                outcomes[rank] = Outcome(rank, value, error, ended=True)
            except EOFError:
                pass
    for process in processes:
        process.join(0 if pipes else 5)
        process.kill()
        process.join(5)
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values of ranks that must all have ended well."""
    for outcome in outcomes:
        assert outcome.ended and not outcome.error, f"rank {outcome.rank}: {outcome.error}"
    return [outcome.value for outcome in outcomes]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(
    pipe: Connection,
    program: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="FATAL",
    )
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((program(rank, world_size, *args), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    # Not through torch's and gloo's exit handlers: a dead peer makes them wait.
    os._exit(0)
