"""`kettle verify`: judge a run by its logs."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

from pathlib import Path
from typing import Annotated

import typer

from kettle.exits import ExitCode


def verify(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG",
            help="JSONL logs of one run, in any order; a folder: all *.jsonl below it.",
        ),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check that a run executed every step once, however often it was evicted.

    Exits 0 if so, 1 if not, 2 if the logs can't be read.

    Example: kettle verify out/demo/trial/
    """
    from kettle.cli.render import show, show_json
    from kettle.evidence.checks import verify as judge
    from kettle.evidence.read import read_logs
    from kettle.evidence.report import eviction_table, verdict_table
    from kettle.evidence.timeline import attempts_of

    verdict = judge(attempts_of(read_logs(logs)))
    if json:
        show_json(verdict)
    else:
        show(eviction_table(verdict), verdict_table(verdict), verdict.sentence)
    raise typer.Exit(ExitCode.OK if verdict.verdict else ExitCode.FAILED)
