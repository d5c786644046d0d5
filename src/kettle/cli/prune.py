"""`kettle checkpoints prune`: delete what a run no longer needs. No torch."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kettle.cli.config import AsJson
from kettle.cli.launch import Overrides
from kettle.cli.render import say, show_json
from kettle.cli.target import Target, TargetName, find, look_at, reading
from kettle.config import CheckpointConfig
from kettle.errors import CheckpointError, KettleError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kettle.checkpoint.catalog import Folder
    from kettle.checkpoint.retention import Policy, Sorted
    from kettle.checkpoint.survey import Run, Survey


@dataclass(frozen=True)
class _Rules:
    """What is to stay."""

    policies: "Sequence[Policy]"
    debris_hours: float
    quarantined_too: bool


@dataclass(frozen=True)
class _Deleted:
    """What is gone. Printed by `--json`."""

    uri: str
    deleted: tuple[str, ...] = ()
    freed_bytes: int = 0


def prune(
    target: TargetName,
    *,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many committed checkpoints are kept, the newest. Default: checkpoint.keep.",
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            min=1,
            help="Keep those of every M steps as well. Default: checkpoint.keep_every.",
        ),
    ] = None,
    debris_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            min=0.0,
            help="Delete unfinished saves to which nothing was written for so long. "
            "Default: checkpoint.debris_hours.",
        ),
    ] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Delete what is in quarantine, too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Delete checkpoints that aren't kept, unfinished saves, and what is damaged or left behind.

    Says first what goes and what stays, and asks on a terminal; anywhere else it needs --yes.
    Committed ones go only after one that stays was read and is whole. The run may go on meanwhile:
    nothing is claimed, and what its newest attempt writes stays. A target that is no run file needs
    --keep.

    Example: kettle checkpoints prune examples/stdlib.toml --keep 2 --yes
    """
    found = find(target, overrides)
    if found.checkpoint is not None:
        raise UsageError(f"{target} is one checkpoint; name its run, {found.uri}")
    rules = _rules(
        found,
        keep=keep,
        keep_every=keep_every,
        debris_older_than=debris_older_than,
        quarantined=quarantined,
    )
    run = look_at(found)
    # With --json stdout is one document, so the words go to stderr.
    tell = say if as_json else typer.echo
    shown = _say_plan(*_plan(run, found, rules), rules, tell=tell)
    if not shown:
        tell("nothing to delete")
        _report(_Deleted(found.uri), as_json=as_json)
        return
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("nothing was deleted; add --yes to delete this without a question")
        if not typer.confirm("delete these?", err=True):
            tell("nothing was deleted")
            _report(_Deleted(found.uri), as_json=as_json)
            return
    try:
        # Looked at anew: an attempt may have begun or saved since the question.
        deleted, faults = _delete(look_at(found), found, rules, among=shown)
    except KettleError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"could not delete everything below {found.uri}: {error}; what is half deleted has no "
            "marker any more, so prune again"
        ) from error
    tell(f"deleted {len(deleted.deleted)}, {deleted.freed_bytes} bytes")
    _report(deleted, as_json=as_json)
    if faults is not None:
        raise CheckpointError(
            f"no checkpoint that stays is whole, so nothing committed was deleted\n{faults}"
            "  keep others with --keep, or let the run save first"
        )


def _report(deleted: _Deleted, *, as_json: bool) -> None:
    if as_json:
        show_json(asdict(deleted))


def _rules(
    target: Target,
    *,
    keep: int | None,
    keep_every: int | None,
    debris_older_than: float | None,
    quarantined: bool,
) -> _Rules:
    from kettle.checkpoint.retention import every, latest

    config = target.config
    if config is not None:
        keep = config.keep if keep is None else keep
        keep_every = config.keep_every if keep_every is None else keep_every
        hours = config.debris_hours
    elif keep is None:
        raise UsageError(
            f"nothing says how many checkpoints of {target.uri} to keep; add --keep N (and "
            "--keep-every M, if the run file has it), or name the run file"
        )
    else:
        hours = float(CheckpointConfig.model_fields["debris_hours"].default)
    policies: list[Policy] = [latest(keep)]
    if keep_every is not None:
        policies.append(every(keep_every))
    return _Rules(
        policies=policies,
        debris_hours=hours if debris_older_than is None else debris_older_than,
        quarantined_too=quarantined,
    )


def _plan(run: "Run", target: Target, rules: _Rules) -> "tuple[Survey, Sorted]":
    from kettle.checkpoint.layout import place_of
    from kettle.checkpoint.retention import sort_out
    from kettle.checkpoint.survey import survey

    with reading(target.uri):
        seen = survey(run, quarantine_after=target.quarantine_after)
    torn = {c.name: c.reason or "torn" for c in seen.checkpoints if c.verdict == "torn"}
    found = sort_out(
        run.listing,
        run.state.model_copy(update={"damaged": {**run.state.damaged, **torn}}),
        policies=rules.policies,
        newest=place_of(seen.resumes_from.name or ""),
        generation=run.state.generation,
        untouched_since_unix_s=time.time() - rules.debris_hours * 3600,
    )
    return seen, found


def _say_plan(
    seen: "Survey", found: "Sorted", rules: _Rules, *, tell: "Callable[[str], None]"
) -> set[str]:
    """Tell what goes and what stays, and return the names and paths of what goes."""
    from kettle.cli.listing import columns, size_words, verdict_words

    keep = {folder.name for folder in found.keep}
    doomed = {folder.name: folder for folder in [*_committed(found, rules), *_others(found)]}
    rows = []
    for checkpoint in seen.checkpoints:
        why = verdict_words(checkpoint)
        if checkpoint.name in doomed and why == "committed":
            why = "committed, and not among those to keep"
        elif checkpoint.name in keep:
            why = "kept"
        fate = "delete" if checkpoint.name in doomed else "keep"
        rows.append((fate, checkpoint.name, size_words(checkpoint.size_bytes), why))
    rows += [
        ("delete", path.rsplit("/", 1)[-1], "", "an object that was never finished")
        for path in found.partials
    ]
    if rows:
        tell("\n".join(columns(rows, right={2})))
    if doomed:
        freed = sum(sum(folder.sizes_bytes.values()) for folder in doomed.values())
        tell(f"frees {size_words(freed)} ({freed} bytes)")
    return {*doomed, *found.partials}


def _committed(found: "Sorted", rules: _Rules) -> "list[Folder]":
    """Those that may go only while one that stays is known to be whole."""
    aside = found.quarantined if rules.quarantined_too else []
    return [*found.retired, *found.left_behind, *aside]


def _others(found: "Sorted") -> "list[Folder]":
    return [*found.damaged, *found.debris]


def _delete(
    run: "Run", target: Target, rules: _Rules, *, among: set[str]
) -> tuple[_Deleted, str | None]:
    """What was deleted, and what is wrong with those that stay, if none of them is whole."""
    from kettle.checkpoint.filesystem import store_faults
    from kettle.checkpoint.protocol import delete

    seen, found = _plan(run, target, rules)
    committed = [folder for folder in _committed(found, rules) if folder.name in among]
    faults = _faults_if_none_is_whole(run, seen, found) if committed else None
    if faults is not None:
        committed = []
    doomed = [*committed, *(folder for folder in _others(found) if folder.name in among)]
    with store_faults():
        for folder in doomed:
            delete(run.filesystem, run.prefix, folder)
        for path in found.partials:
            if path in among:
                with suppress(FileNotFoundError):
                    run.filesystem.rm_file(path)
    freed = sum(sum(folder.sizes_bytes.values()) for folder in doomed)
    return _Deleted(target.uri, tuple(folder.name for folder in doomed), freed), faults


def _faults_if_none_is_whole(run: "Run", seen: "Survey", found: "Sorted") -> str | None:
    """Read what stays until one is whole: None if there is one, or what is wrong with them."""
    from kettle.checkpoint.check import fault_of
    from kettle.checkpoint.protocol import one_is_whole
    from kettle.cli.progress import transfer

    markers = {checkpoint.name: checkpoint.marker for checkpoint in seen.checkpoints}
    faults: list[str] = []

    def verify(folder: "Folder") -> bool:
        marker = markers[folder.name]
        if marker is None:
            return False
        title = f"reading step {folder.place.step}"
        with transfer(title, size_bytes=marker.size_bytes) as progress:
            fault = fault_of(
                run.filesystem,
                f"{run.prefix}/{folder.name}",
                marker,
                uri=f"{run.uri}/{folder.name}",
                progress=progress,
            )
        if fault is not None:
            faults.append(f"  {folder.name}: {fault}\n")
        return fault is None

    with reading(run.uri):
        whole = one_is_whole(found.keep, verified=(), verify=verify)
    return None if whole else "".join(faults)
