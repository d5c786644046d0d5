"""The Typer app: which commands there are, and how an expected error ends the process.

Importing this module must stay quick and free of torch, so a command imports what it needs when it
runs.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated

import typer

from kettle.cli.chaos import chaos
from kettle.cli.checkpoints import checkpoints
from kettle.cli.compare import compare
from kettle.cli.config import config
from kettle.cli.diff import diff
from kettle.cli.doctor import doctor
from kettle.cli.launch import launch, train
from kettle.cli.render import say
from kettle.cli.verify import verify
from kettle.errors import KettleError
from kettle.exits import ExitCode

app = typer.Typer(
    name="kettle",
    help="Fine-tune on capacity that may vanish, and prove that every resume was exact.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # the only mode that joins the lines of a paragraph
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 complete or verdict true, 1 failed or verdict false, "
    "2 can't be used as given, 3 no usable checkpoint, 4 superseded by a newer attempt, "
    "74 the store failed, 75 preempted.",
)
app.command()(launch)
app.command()(train)
app.command()(verify)
app.command()(compare)
app.command()(diff)
app.command()(chaos)
app.command()(doctor)
app.add_typer(config)
app.add_typer(checkpoints)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (by default the process's own) and return its exit status."""
    try:
        app(args=arguments, prog_name="kettle")
    except KettleError as error:
        say(f"error: {error}")
        return int(error.exit_code)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(ExitCode.OK)
    return int(ExitCode.OK)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - Typer calls it by position
    if wanted:
        typer.echo(f"kettle {importlib.metadata.version('kettle')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass
