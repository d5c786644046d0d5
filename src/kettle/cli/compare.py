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

    Says so where they are of different runs or steps. With the records of both runs, name the first
    step that differs as well. Exits 0 if nothing differs, 1 if anything does, 2 if something can't
    be read.

    Example: kettle compare out/reference/step-00000060-a1b2 out/trial/step-00000060-c3d4
    """
    if bool(records_reference) != bool(records_trial):
        raise UsageError(
            "the records of one run only were given; give both --records-reference and "
            "--records-trial, or neither"
        )
    from kettle.checkpoint.filesystem import use_endpoint
    from kettle.cli.render import show, show_json
    from kettle.config import deployment_facts
    from kettle.evidence.checks import first_difference
    from kettle.evidence.compare import ComparisonWithRecords
    from kettle.evidence.compare import compare as compare_checkpoints
    from kettle.evidence.read import read_logs
    from kettle.evidence.report import comparison_table, difference_line, origin_lines

    if endpoint := deployment_facts().s3_endpoint:
        use_endpoint(endpoint)
    comparison = compare_checkpoints(reference, trial)
    sentences = origin_lines(comparison)
    same = comparison.identical
    if records_reference and records_trial:
        difference = first_difference(read_logs(records_reference), read_logs(records_trial))
        comparison = ComparisonWithRecords(**dict(comparison), first_difference=difference)
        sentences.append(difference_line(difference))
        same = same and difference is None
    if json:
        show_json(comparison)
    else:
        show(comparison_table(comparison), *sentences)
    raise typer.Exit(ExitCode.OK if same else ExitCode.FAILED)
