"""The ``nemo-rl-rlix`` command.

``--help`` must answer at once, so that a subcommand's module is imported when the
subcommand runs, not before.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import typer

from nemo_rl_rlix import __version__
from nemo_rl_rlix.errors import SettingError

PROGRAM = "nemo-rl-rlix"
EXIT_BAD_SETTING = 2


@dataclass(frozen=True)
class LazyCommand:
    """A subcommand whose module is imported only when it runs.

    Attributes:
        name: Name on the command line.
        module: Module that holds its function.
        function: Name of the function, typed as typer expects.
        summary: One line for ``--help``.
        starts_program: The arguments name a program and are its own, options included.
    """

    name: str
    module: str
    function: str
    summary: str
    starts_program: bool = False

    def __call__(self, context: typer.Context) -> None:
        """Import the function and let it parse the rest of the command line."""
        command = getattr(importlib.import_module(self.module), self.function)
        sub = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        own = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        sub.command(context_settings=own if self.starts_program else {})(command)
        sub(args=list(context.args), prog_name=f"{PROGRAM} {self.name}")


LAZY_COMMANDS = (
    LazyCommand(
        "demo",
        "nemo_rl_rlix.reference.demo_cli",
        "demo",
        "Run two pipelines that share two logical GPUs, on the CPU.",
    ),
    LazyCommand(
        "run",
        "nemo_rl_rlix.nemo_rl.run_cli",
        "run",
        "Run a NeMo RL script time-shared: run -- SCRIPT.py [ARGS].",
        starts_program=True,
    ),
)

app = typer.Typer(
    name=PROGRAM,
    help="GPU time-sharing for NeMo RL async GRPO pipelines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options() -> None:
    """GPU time-sharing for NeMo RL async GRPO pipelines."""


@app.command()
def version() -> None:
    """Print the version of this package."""
    typer.echo(__version__)


def _register(lazy: LazyCommand) -> None:
    def run(context: typer.Context) -> None:
        lazy(context)

    app.command(
        lazy.name,
        help=lazy.summary,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run)


for _lazy in LAZY_COMMANDS:
    _register(_lazy)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SettingError as error:
        typer.echo(f"{PROGRAM}: {error}", err=True)
        raise SystemExit(EXIT_BAD_SETTING) from error
