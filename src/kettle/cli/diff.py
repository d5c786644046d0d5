"""`kettle diff`: where two logs part, and why."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

from pathlib import Path
from typing import Annotated

import typer

from kettle.cli.config import AsJson
from kettle.exits import ExitCode


def diff(
    reference: Annotated[Path, typer.Argument(help="A JSONL log, or a folder of a run's logs.")],
    trial: Annotated[Path, typer.Argument(help="The same of the other run.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Find the first step at which two runs of one experiment differ.

    Says whether samples, learning rate, random streams, loss, gradients or weights differ first,
    and which part of the state that makes a suspect. Needs no checkpoint and no torch. Exits 0 if
    no common step differs, 1 if one does, 2 if the logs can't be compared.

    Example: kettle diff out/demo/reference-1 out/demo/trial
    """
    from kettle.cli.render import show, show_json
    from kettle.evidence.diff import diff as compare_logs
    from kettle.evidence.read import read_logs
    from kettle.evidence.report import difference_line

    found = compare_logs(read_logs([reference]), read_logs([trial]))
    if as_json:
        show_json(found)
    else:
        if found.difference is not None:
            show(difference_line(found.difference))
        show(found.sentence)
    raise typer.Exit(ExitCode.OK if found.same else ExitCode.FAILED)
