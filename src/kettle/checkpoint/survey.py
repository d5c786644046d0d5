"""What lies below a run's prefix, each checkpoint with a verdict. Reads, and claims nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsspec import AbstractFileSystem
from pydantic import BaseModel, ConfigDict, Field

from kettle.checkpoint.catalog import Folder, Listing, look
from kettle.checkpoint.events import LogState
from kettle.checkpoint.layout import Place, join, place_of
from kettle.checkpoint.log import Tail, read_tail
from kettle.checkpoint.marker import Marker
from kettle.checkpoint.protocol import Candidate, inspect
from kettle.errors import CheckpointError

Verdict: TypeAlias = Literal[
    "committed", "torn", "uncommitted", "quarantined", "damaged", "left behind"
]


class Seen(BaseModel):
    """A checkpoint's folder, judged by its marker, its sizes and the log; digests are not read."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="Its folder below the run's prefix.")
    uri: str
    step: int
    generation: int = Field(description="Which claim of the run's log its writer held.")
    attempt_id: str
    size_bytes: int = Field(description="What is there now, the marker included.")
    saved_unix_s: float | None = Field(description="null: it has no marker that can be read.")
    save_ms: float | None = Field(description="null: as above.")
    verdict: Verdict = Field(
        description="uncommitted: debris, or being written. left behind: from before the run "
        "began again with --from-scratch."
    )
    reason: str | None = Field(description="Why it isn't simply committed, or what is still due.")
    marker: Marker | None = Field(exclude=True)

    @property
    def place(self) -> Place:
        """Its order among checkpoints."""
        return Place(step=self.step, generation=self.generation, name=self.name)

    @property
    def claims_to_be_whole(self) -> bool:
        """Whether somebody committed it, so that it has to hold."""
        return self.verdict not in ("uncommitted", "left behind")


class Next(BaseModel):
    """What the next attempt begins from, if nothing is saved until then."""

    model_config = ConfigDict(frozen=True)

    name: str | None = Field(description="The checkpoint's folder; null: none.")
    step: int = Field(description="0 where it begins without a checkpoint.")
    refusal: str | None = Field(description="Why the attempt would end at once; null: it wouldn't.")


class Survey(BaseModel):
    """A run's checkpoints, the newest first. Printed by `kettle checkpoints list --json`."""

    model_config = ConfigDict(frozen=True)

    uri: str = Field(description="The run's prefix.")
    run_id: str
    generation: int = Field(description="The newest claim of the run; 0: nobody has claimed it.")
    attempt_id: str = Field(description="Who made it.")
    resumes_from: Next
    checkpoints: tuple[Seen, ...]


@dataclass(frozen=True)
class Run:
    """A run as it was found.

    Attributes:
        tail: what the log said, read before the listing.
    """

    filesystem: AbstractFileSystem
    prefix: str
    uri: str
    tail: Tail
    listing: Listing

    @property
    def state(self) -> LogState:
        """What the log's newest entry says."""
        return self.tail.state

    @property
    def is_there(self) -> bool:
        """Whether an attempt has ever claimed or saved anything here."""
        return bool(self.tail.number or self.listing.folders)


def open_run(filesystem: AbstractFileSystem, prefix: str, *, uri: str) -> Run:
    """Read the log of a run, then list what is there. Raises OSError."""
    tail = read_tail(filesystem, prefix)
    return Run(filesystem, prefix, uri, tail, look(filesystem, prefix))


def survey(run: Run, *, quarantine_after: int) -> Survey:
    """Judge every checkpoint of a run.

    Args:
        quarantine_after: as checkpoint.quarantine_after of the run file.

    Raises:
        OSError: the store can't be read.
    """
    folders = list(run.listing.folders)
    newest = place_of(run.state.newest or "")
    if newest is not None and newest not in [folder.place for folder in folders]:
        folders.append(Folder(place=newest, sizes_bytes={}, touched_unix_s=0.0))
    folders.sort(key=lambda folder: folder.place, reverse=True)
    seen = [_judge(run, folder) for folder in folders]
    ids = [checkpoint.marker.run_id for checkpoint in seen if checkpoint.marker is not None]
    return Survey(
        uri=run.uri,
        run_id=ids[0] if ids else run.uri.rstrip("/").rsplit("/", 1)[-1],
        generation=run.state.generation,
        attempt_id=run.state.attempt_id,
        resumes_from=_next(run.state, seen, quarantine_after=quarantine_after),
        checkpoints=tuple(seen),
    )


def _judge(run: Run, folder: Folder) -> Seen:
    name, state = folder.name, run.state
    marker: Marker | None = None
    reason: str | None = None
    if folder.has_marker or name == state.newest:
        marker, reason = _examine(run, folder)
    elif folder.place.generation < state.generation:
        reason = "a save that never ended"
    else:
        reason = "the newest attempt is writing it, or has died"
    verdict: Verdict = "committed" if marker is not None else "torn"
    if not folder.has_marker and name != state.newest:
        verdict = "uncommitted"
    elif folder.place.generation < state.from_generation:
        verdict, reason = "left behind", "from before the run began again with --from-scratch"
    elif name in state.quarantined:
        verdict, reason = "quarantined", state.quarantined[name]
    elif name in state.damaged:
        verdict, reason = "damaged", _without_uri(state.damaged[name], name)
    return Seen(
        name=name,
        uri=join(run.uri, name),
        step=folder.place.step,
        generation=folder.place.generation,
        attempt_id=marker.attempt_id if marker else name.split("-", 3)[3],
        size_bytes=sum(folder.sizes_bytes.values()),
        saved_unix_s=marker.saved_unix_s if marker else None,
        save_ms=marker.save_ms if marker else None,
        verdict=verdict,
        reason=reason,
        marker=marker,
    )


def _examine(run: Run, folder: Folder) -> tuple[Marker | None, str | None]:
    """What its marker says, if that holds; and what is wrong with it, or still due."""
    try:
        found = inspect(run, folder.name, sizes_bytes=folder.sizes_bytes)
    except FileNotFoundError:
        return None, "its marker was deleted just now"
    except CheckpointError as error:  # of another version
        return None, _without_uri(str(error), folder.name)
    if not isinstance(found, Candidate):
        return None, _without_uri(found.reason, folder.name)
    if found.needs_marker:
        return found.marker, "granted by the log; the next attempt writes its marker"
    return found.marker, None


def _next(state: LogState, seen: Sequence[Seen], *, quarantine_after: int) -> Next:
    failures = state.failures
    if failures is not None and state.last_chance is not None:
        refusal = f"the run crashes from older checkpoints, too: {failures.error}"
        return Next(name=None, step=0, refusal=refusal)
    stuck = failures is not None and failures.count >= quarantine_after
    to_come = failures.checkpoint if failures is not None and stuck else None
    usable = [c for c in seen if c.verdict == "committed" and c.name != to_come]
    if usable:
        # A log without a gap goes before the order of steps.
        named = [c for c in usable if c.name == state.newest and not state.has_gap]
        best = (named or usable)[0]
        return Next(name=best.name, step=best.step, refusal=None)
    lost = "the run has committed checkpoints, and none of them can be used"
    is_lost = any(checkpoint.claims_to_be_whole for checkpoint in seen)
    return Next(name=None, step=0, refusal=lost if is_lost else None)


def _without_uri(reason: str, name: str) -> str:
    """A reason without the checkpoint that it begins with."""
    _, found, rest = reason.partition(f"{name}: ")
    return rest if found else reason
