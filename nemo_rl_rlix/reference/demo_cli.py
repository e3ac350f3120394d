"""``nemo-rl-rlix demo``."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nemo_rl_rlix.errors import RLixError, SettingError
from nemo_rl_rlix.reference.options import MAX_SEED, MIN_STEPS, DemoMode, DemoOptions
from nemo_rl_rlix.settings import PreemptedRequests

DEFAULT_STEPS: int = DemoOptions.model_fields["steps"].default


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Train on this file: JSON lines of {"prompt": ..., "answer": ...}.'
            " Default: counting problems that are made up.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=MIN_STEPS, metavar="N", help="Training steps of each pipeline.")
    ] = DEFAULT_STEPS,
    seed: Annotated[
        int,
        typer.Option(min=0, max=MAX_SEED, metavar="N", help="Seed of weights, data and sampling."),
    ] = 0,
    policy: Annotated[
        PreemptedRequests,
        typer.Option(
            help="What a request does whose GPU is taken: resume keeps the tokens sampled so"
            " far, restart throws them away."
        ),
    ] = PreemptedRequests.RESUME,
    mode: Annotated[
        DemoMode,
        typer.Option(help="alone: each pipeline on its half of the GPUs; shared; or both."),
    ] = DemoMode.BOTH,
    kill_shard: Annotated[
        bool,
        typer.Option(
            "--kill-shard", help="End a shard's process in the shared run; it must still finish."
        ),
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the figures here; merges with what is there."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="New folder for trace and picture. Default: ./runs/demo-<date>."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Log lines instead of the live view.")
    ] = False,
) -> None:
    """Two GRPO pipelines share two logical GPUs, on the CPU, in about three minutes.

    First each pipeline trains alone on its half, then both share the GPUs, with the same seeds
    and steps. Ends with a table of what sharing brought, a picture of who used which GPU, and a
    trace for https://ui.perfetto.dev.

    Exit status: 0; 1 if the run failed or lost, duplicated or wrongly trained anything;
    2 if an option cannot work.
    """
    console = Console()
    complaints = Console(stderr=True)
    try:
        options = DemoOptions.checked(
            out=out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}",
            data=data,
            steps=steps,
            seed=seed,
            policy=policy,
            mode=mode,
            json_path=json_path,
            kill_shard=kill_shard,
            plain=plain,
        )
        # Imported here: torch and Ray must not load for --help or a mistyped option.
        from nemo_rl_rlix.reference.demo import run_demo
        from nemo_rl_rlix.reference.present import present, write_artifacts

        result = run_demo(options)
        broken = present(result, write_artifacts(result, options), console)
    except RLixError as error:
        complaints.print(f"demo: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2 if isinstance(error, SettingError) else 1) from error
    if broken:
        for line in broken:
            complaints.print(f"demo: {line}; this must be 0", style="red", highlight=False)
        raise typer.Exit(1)
