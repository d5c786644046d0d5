"""`kettle chaos`: evict a run on purpose and prove that it didn't matter."""

# ruff: noqa: PLC0415 - torch takes seconds to import, and only this command's body needs it

from pathlib import Path
from typing import Annotated

import typer

from kettle.errors import UsageError
from kettle.exits import ExitCode


def chaos(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    *,
    evictions: Annotated[
        int, typer.Option(metavar="N", help="How often the trial is evicted, with SIGTERM.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for records, checkpoints, chaos.json and the loss plot. What an earlier "
            "chaos run wrote there is replaced.",
        ),
    ],
    seed: Annotated[
        int | None,
        typer.Option(metavar="S", help="Jitter the evictions, the same way for the same seed."),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            metavar="W[,W...]",
            help="Workers of each attempt. A list goes attempt by attempt and starts over at its "
            "end; the references use its first entry.",
        ),
    ] = "2",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a field; may be repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Evict a run on purpose, resume it each time, and compare it with an undisturbed one.

    Two undisturbed references give the nondeterminism floor. Exits 0 only if the trial executed
    every step once and ends bit-identical, 1 if not, 2 if something can't be used as given.

    Example: kettle chaos examples/stdlib.toml --evictions 5 --workers 2 --out out/demo
    """
    from kettle.chaos.drive import plot, run_chaos
    from kettle.chaos.folder import Folder
    from kettle.chaos.triggers import terminate_launcher
    from kettle.cli.progress import phases
    from kettle.cli.render import say, show, show_json
    from kettle.evidence.report import difference_line, eviction_table, summary_table

    try:
        with phases() as progress:
            result = run_chaos(
                run_file,
                evictions=evictions,
                seed=seed,
                workers=workers,
                overrides=overrides or [],
                out=out,
                trigger=terminate_launcher,
                progress=progress,
            )
    except KeyboardInterrupt:
        say("interrupted; every attempt was stopped")
        raise typer.Exit(ExitCode.FAILED) from None
    try:
        plot(Folder(out=out))
    except UsageError as error:
        # The verdict stands without its picture.
        say(f"no loss plot: {error}")
    if json:
        show_json(result)
    else:
        show(
            eviction_table(result.trial),
            summary_table(
                result.trial, result.comparison, floor=result.floor, judgement=result.verdict
            ),
            result.trial.sentence,
            difference_line(result.first_difference),
        )
    say(f"took {result.wall_s:.0f} s; records and chaos.json are in {out}/")
    raise typer.Exit(ExitCode.OK if result.passed else ExitCode.FAILED)
