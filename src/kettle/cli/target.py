"""From what a person names to a run's prefix or one checkpoint: run files, paths and URIs."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kettle.config import CheckpointConfig, deployment_facts, load
from kettle.errors import KettleError, UsageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from kettle.checkpoint.survey import Run, Seen

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A run file (RUN.toml), or the folder or URI of a run's checkpoints."
    ),
]
CheckpointName = Annotated[
    str, typer.Argument(metavar="CKPT", help="Folder or URI of one checkpoint.")
]


@dataclass(frozen=True)
class Target:
    """A run, or one checkpoint of it.

    Attributes:
        uri: the run's prefix.
        checkpoint: the folder of one checkpoint, where that was named.
        config: what the run file says, where one was named.
    """

    uri: str
    filesystem: "AbstractFileSystem"
    prefix: str
    checkpoint: str | None
    config: CheckpointConfig | None

    @property
    def quarantine_after(self) -> int:
        """How many crashes set a checkpoint aside."""
        if self.config is not None:
            return self.config.quarantine_after
        return int(CheckpointConfig.model_fields["quarantine_after"].default)


def find(name: str, overrides: Sequence[str] | None = None) -> Target:
    """What a person means by a name.

    Raises:
        UsageError: there is an override and no run file, or no such kind of store.
        ConfigError, DataError: of the run file.
    """
    from kettle.checkpoint.filesystem import absolute, open_store
    from kettle.checkpoint.layout import place_of
    from kettle.data.identify import identify
    from kettle.errors import CheckpointError
    from kettle.identity import checkpoint_prefix

    config, checkpoint = None, None
    if is_run_file(name):
        run = load(Path(name), overrides or [])
        config = run.checkpoint
        uri = checkpoint_prefix(absolute(config.root), identify(run).run_id)
    else:
        refuse_overrides(name, overrides)
        uri = absolute(name).rstrip("/")
        above, _, last = uri.rpartition("/")
        if place_of(last) is not None:
            uri, checkpoint = above, last
    use_stores(uri)
    try:
        filesystem, prefix = open_store(uri)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    return Target(uri, filesystem, prefix, checkpoint, config)


def is_run_file(name: str) -> bool:
    """Whether a person has named a run file, and no store."""
    return name.endswith(".toml")


def refuse_overrides(name: str, overrides: Sequence[str] | None) -> None:
    """Raise UsageError where there are overrides, and no run file to override."""
    if overrides:
        raise UsageError(
            f"--set {overrides[0]} changes a run file, and {name} is none; name RUN.toml"
        )


def use_stores(name: str, *, patience_s: float = 120.0) -> None:
    """Go to the store that the environment names.

    Args:
        patience_s: one that doesn't answer is given up after half of it; by default that takes
            minutes.
    """
    from kettle.checkpoint.filesystem import bound_retries, use_endpoint

    if endpoint := deployment_facts().s3_endpoint:
        use_endpoint(endpoint)
    if name.startswith("s3:"):
        bound_retries(patience_s)


def look_at(target: Target) -> "Run":
    """Read the log of a run and list what is there.

    Raises:
        UsageError: nothing of a run is there, or the store can't be read.
    """
    from kettle.checkpoint.survey import open_run

    with reading(target.uri):
        run = open_run(target.filesystem, target.prefix, uri=target.uri)
        if run.is_there:
            return run
        if target.config is not None:
            raise UsageError(f"the run has saved nothing yet below {target.uri}")
        raise UsageError(f"there is no run at {target.uri}; {_advice(target)}")


def find_checkpoint(name: str) -> "tuple[Run, Seen]":
    """The checkpoint that a person names, and its run.

    Raises:
        UsageError: it names none, nothing is there, or the store can't be read.
    """
    target = find(name)
    if target.checkpoint is None:
        raise UsageError(
            f"{name} names no checkpoint; name a folder such as "
            "ROOT/RUN_ID/step-00000060-g0001-ATTEMPT, as `kettle checkpoints list` does"
        )
    run = look_at(target)
    return run, seen_in(run, target)


def seen_in(run: "Run", target: Target) -> "Seen":
    """The one checkpoint that a target names. Raises UsageError where it isn't there."""
    from kettle.checkpoint.survey import survey

    with reading(target.uri):
        found = survey(run, quarantine_after=target.quarantine_after).checkpoints
    for checkpoint in found:
        if checkpoint.name == target.checkpoint:
            return checkpoint
    raise UsageError(
        f"there is no {target.checkpoint} in {target.uri}; "
        f"`kettle checkpoints list {target.uri}` says what is there"
    )


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Raise a store that can't be read as a UsageError."""
    from kettle.checkpoint.filesystem import store_faults

    try:
        with store_faults():
            yield
    except KettleError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"can't read {uri}: {type(error).__name__}: {error}; correct the name, or give this "
            "process access"
        ) from error


def _advice(target: Target) -> str:
    """What to name instead: often it is a run id that is missing at the end."""
    from kettle.checkpoint.layout import LOG, join

    try:
        entries = target.filesystem.ls(target.prefix, detail=False)
        names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in sorted(entries)]
        runs = [n for n in names[:20] if target.filesystem.exists(join(target.prefix, n, LOG))]
    except (OSError, ValueError):
        runs = []
    if runs:
        return f"below it are these: {', '.join(runs)}"
    return "name the folder ROOT/RUN_ID, or the run file"
