"""`kettle checkpoints`: look at what a run has saved. Only `show` and `export` need torch."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kettle.cli.config import AsJson
from kettle.cli.export import export
from kettle.cli.launch import Overrides
from kettle.cli.prune import prune
from kettle.cli.target import (
    CheckpointName,
    Target,
    TargetName,
    find,
    find_checkpoint,
    look_at,
    reading,
    seen_in,
)
from kettle.errors import UsageError
from kettle.exits import ExitCode

if TYPE_CHECKING:
    from kettle.checkpoint.survey import Run, Seen

checkpoints = typer.Typer(
    name="checkpoints",
    help="Look at what a run has saved, check it, put it in order, and take a model out of it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@checkpoints.command("list")
def list_(target: TargetName, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, the newest first, each with a verdict.

    Reads the log, markers and sizes; `kettle checkpoints check` reads the bytes. Says before what
    the next attempt would resume from.

    Example: kettle checkpoints list examples/stdlib.toml
    """
    from kettle.checkpoint.survey import survey
    from kettle.cli.listing import survey_lines
    from kettle.cli.render import show_json

    found = find(target, overrides)
    run = look_at(found)
    with reading(found.uri):
        seen = survey(run, quarantine_after=found.quarantine_after)
    if as_json:
        show_json(seen)
    else:
        typer.echo("\n".join(survey_lines(seen)))


@checkpoints.command()
def show(checkpoint: CheckpointName, *, as_json: AsJson = False) -> None:
    """Show what a checkpoint's marker says, its objects, and what each part of the run holds.

    Example: kettle checkpoints show out/checkpoints/stdlib-tiny-0123456789ab/step-00000060-g0001-a
    """
    from kettle.checkpoint.contents import parts_of
    from kettle.cli.listing import columns, marker_rows, size_words, verdict_words
    from kettle.cli.render import show_json

    run, seen = find_checkpoint(checkpoint)
    marker = seen.marker
    if marker is None:
        raise UsageError(f"{seen.uri} can't be shown; it is {verdict_words(seen)}")
    with reading(seen.uri):
        parts = parts_of(run.filesystem, f"{run.prefix}/{seen.name}", marker=marker, uri=seen.uri)
    if as_json:
        document: dict[str, Any] = {"uri": seen.uri, "verdict": seen.verdict, "reason": seen.reason}
        document["marker"] = marker.model_dump(mode="json")
        document["parts"] = [part.model_dump() for part in parts]
        show_json(document)
        return
    typer.echo(seen.uri)
    facts = [("verdict", verdict_words(seen)), *marker_rows(marker)]
    typer.echo("\n".join(columns(facts, right=set())) + "\n")
    objects = [(n, str(e.size_bytes), e.digest) for n, e in marker.objects.items()]
    typer.echo("\n".join(columns([("object", "bytes", "digest"), *objects], right={1})) + "\n")
    rows = [(p.name, str(p.tensors), str(p.size_bytes), size_words(p.size_bytes)) for p in parts]
    typer.echo("\n".join(columns([("part", "tensors", "bytes", ""), *rows], right={1, 2, 3})))


@checkpoints.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A run file (RUN.toml), the folder or URI of a run's checkpoints, or of one.",
        ),
    ],
    *,
    overrides: Overrides = None,
    every: Annotated[
        bool, typer.Option("--all", help="Go on after a bad one, and report every one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of what was committed, and compare it with the digests of the markers.

    Begins with the newest and stops at the first bad one. What is in quarantine counts; what was
    left behind by --from-scratch doesn't. Exits 0 if all are good, 1 otherwise, 2 if there is
    nothing to check or it can't be read.

    Example: kettle checkpoints check examples/stdlib.toml --all
    """
    from kettle.cli.render import say, show_json

    found = find(target, overrides)
    run = look_at(found)
    chosen = _to_check(run, found)
    results: list[dict[str, Any]] = []
    for seen in chosen:
        fault = _fault(run, seen)
        if fault is not None and _is_gone(run, seen):
            say(f"{seen.name} was deleted meanwhile")
            continue
        results.append(
            {"name": seen.name, "uri": seen.uri, "good": fault is None, "reason": fault}
            | {"size_bytes": seen.size_bytes}
        )
        if not as_json:
            typer.echo(f"good  {seen.name}" if fault is None else f"BAD   {seen.name}: {fault}")
        if fault is not None and not every:
            break
    good = all(result["good"] for result in results)
    if as_json:
        show_json({"uri": found.uri, "good": good, "checkpoints": results})
    elif good:
        total = sum(result["size_bytes"] for result in results)
        typer.echo(f"every byte of {len(results)} is what its marker says ({total} bytes)")
    elif unread := len(chosen) - len(results):
        typer.echo(f"{unread} older not checked; add --all to go on")
    raise typer.Exit(ExitCode.OK if good else ExitCode.FAILED)


@checkpoints.command()
def release(checkpoint: CheckpointName, *, as_json: AsJson = False) -> None:
    """Take a checkpoint out of quarantine, so that attempts may resume from it again.

    Whatever made attempts crash should be removed before. The next attempt looks for the newest
    checkpoint anew.

    Example: kettle checkpoints release out/checkpoints/tiny-0123456789ab/step-00000060-g0001-a
    """
    from kettle.checkpoint.events import Released
    from kettle.checkpoint.filesystem import store_faults
    from kettle.checkpoint.log import note
    from kettle.cli.listing import verdict_words
    from kettle.cli.render import show_json
    from kettle.errors import CheckpointError, KettleError

    run, seen = find_checkpoint(checkpoint)
    if seen.name not in run.state.quarantined:
        raise UsageError(f"{seen.uri} is not in quarantine; it is {verdict_words(seen)}")
    try:
        with store_faults():
            note(run.filesystem, run.prefix, Released(name=seen.name), attempt_id="by-hand")
    except KettleError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"can't write into the log of {run.uri}: {error}; give this process access"
        ) from error
    if as_json:
        show_json({"checkpoint_uri": seen.uri, "released": True})
        return
    typer.echo(f"released {seen.name}; the next attempt may resume from it")


checkpoints.command()(prune)
checkpoints.command()(export)


def _to_check(run: "Run", target: Target) -> "list[Seen]":
    from kettle.checkpoint.survey import survey
    from kettle.cli.listing import verdict_words

    if target.checkpoint is not None:
        seen = seen_in(run, target)
        if seen.verdict == "uncommitted":
            raise UsageError(f"{seen.uri} can't be checked; it is {verdict_words(seen)}")
        return [seen]
    with reading(target.uri):
        found = survey(run, quarantine_after=target.quarantine_after).checkpoints
    chosen = [checkpoint for checkpoint in found if checkpoint.claims_to_be_whole]
    if not chosen:
        raise UsageError(
            f"no checkpoint below {target.uri} is committed, so there is none to check"
        )
    return chosen


def _fault(run: "Run", seen: "Seen") -> str | None:
    """What is wrong with a checkpoint's bytes; a message on one line."""
    from kettle.checkpoint.check import fault_of
    from kettle.cli.progress import transfer

    if seen.marker is None:
        return seen.reason or "its marker can't be read"
    title, size_bytes = f"checking step {seen.step}", seen.marker.size_bytes
    with reading(seen.uri), transfer(title, size_bytes=size_bytes) as progress:
        return fault_of(
            run.filesystem,
            f"{run.prefix}/{seen.name}",
            seen.marker,
            uri=seen.uri,
            progress=progress,
        )


def _is_gone(run: "Run", seen: "Seen") -> bool:
    """Whether a checkpoint that had a marker has none any more: an attempt prunes, too."""
    from kettle.checkpoint.layout import MARKER

    had_marker = any(f.name == seen.name and f.has_marker for f in run.listing.folders)
    with reading(seen.uri):
        run.filesystem.invalidate_cache()
        return had_marker and not run.filesystem.exists(f"{run.prefix}/{seen.name}/{MARKER}")
