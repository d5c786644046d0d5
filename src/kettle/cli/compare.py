"""`kettle compare`: hold two checkpoints against each other."""

# ruff: noqa: PLC0415 - torch takes seconds to import, and only this command's body needs it

from pathlib import Path
from typing import Annotated

import typer

from kettle.errors import UsageError
from kettle.exits import ExitCode


def compare(
    reference: Annotated[
        str, typer.Argument(metavar="REF_URI", help="Checkpoint of the uninterrupted run.")
    ],
    trial: Annotated[
        str, typer.Argument(metavar="TRIAL_URI", help="Checkpoint of the interrupted run.")
    ],
    *,
    records_reference: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="Log or folder of the reference; may be repeated."),
    ] = None,
    records_trial: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="Log or folder of the trial; may be repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare all tensors of two checkpoints bit by bit, also the optimizer's and the RNG's.

    With the records of both runs, name the first step that differs as well. Exits 0 if nothing
    differs, 1 if anything does, 2 if something can't be read.

    Example: kettle compare out/ref/RUN_ID/step-00000060 out/trial/RUN_ID/step-00000060
    """
    if (records_reference is None) != (records_trial is None):
        raise UsageError(
            "the records of one run only were given; give both --records-reference and "
            "--records-trial, or neither"
        )
    from kettle.cli.render import show, show_json
    from kettle.evidence.checks import first_difference
    from kettle.evidence.compare import compare as compare_checkpoints
    from kettle.evidence.read import read_logs
    from kettle.evidence.report import comparison_table, difference_line

    given = records_reference is not None and records_trial is not None
    difference = (
        first_difference(read_logs(records_reference or []), read_logs(records_trial or []))
        if given
        else None
    )
    comparison = compare_checkpoints(reference, trial)
    if json:
        document = comparison.model_dump(mode="json")
        if given:
            document["first_difference"] = difference and difference.model_dump(mode="json")
        show_json(document)
    else:
        show(comparison_table(comparison), *([difference_line(difference)] if given else []))
    same = comparison.identical and difference is None
    raise typer.Exit(ExitCode.OK if same else ExitCode.FAILED)
