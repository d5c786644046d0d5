"""Save and load sharded checkpoints; collective, on any number of ranks.

The write order is the completeness proof: all ranks write their shards, all ranks meet, rank 0
writes `_COMMIT`. Whoever finds a marker finds everything it names.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from kettle.checkpoint.catalog import newest_first
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import MARKER, checkpoint_name, join
from kettle.checkpoint.marker import (
    FORMAT_VERSION,
    Marker,
    check_identity,
    check_sizes,
    read_marker,
)
from kettle.distributed import Ranks, gather_texts, told_by_first
from kettle.errors import CheckpointError, TornCheckpointError
from kettle.identity import library_versions


class Stateful(Protocol):
    """A part of a run, with tensors only."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The state at the last step boundary."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of a checkpoint."""
        ...


@dataclass(frozen=True)
class Saved:
    """A checkpoint that this attempt committed."""

    step: int
    uri: str
    save_ms: float
    size_bytes: int


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    uri: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, if there is one, and the newer ones that are not."""

    uri: str | None
    step: int | None
    versions: Mapping[str, str]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, as one attempt sees them.

    Attributes:
        prefix: folder or URI above them.
        ranks: who saves and loads together.
    """

    prefix: str
    run_id: str
    fingerprint: str
    attempt_id: str
    ranks: Ranks

    def save(self, step: int, parts: Mapping[str, Stateful]) -> Saved:
        """Write all parts as of the last step boundary and commit them; collective.

        Raises:
            CheckpointError: a rank could not write. The checkpoint has no marker then.
        """
        started = time.monotonic()
        uri = join(self.prefix, checkpoint_name(step, attempt_id=self.attempt_id))
        state = {name: dict(part.state_dict()) for name, part in parts.items()}
        try:
            dcp.save(state, checkpoint_id=uri, process_group=self.ranks.control)
        except CheckpointException as error:
            raise _unwrapped(error, doing=f"save {uri}") from error
        # dcp.save returns when every rank has written, so the marker goes last.
        size_bytes = told_by_first(lambda: self._commit(step, uri), ranks=self.ranks)
        save_ms = (time.monotonic() - started) * 1e3
        return Saved(step=step, uri=uri, save_ms=save_ms, size_bytes=size_bytes)

    def latest_complete(self) -> Found:
        """The newest checkpoint that is whole; collective.

        Rank 0 looks: one listing, and one read for each marker until one holds.

        Raises:
            CheckpointError: the newest whole one belongs to another experiment or device, or the
                store can't be read.
        """
        return told_by_first(self._latest_complete, ranks=self.ranks)

    def load(self, uri: str, parts: Mapping[str, Stateful]) -> None:
        """Restore every part from a checkpoint, or raise; collective.

        Raises:
            CheckpointError: a key is missing or foreign, or an object can't be read. Parts may
                then hold a mixture of old and new: the process must not train on.
        """
        state = {name: dict(part.state_dict()) for name, part in parts.items()}
        mine = [f"{name}.{key}" for name, tensors in state.items() for key in tensors]
        expected = set(gather_texts(mine, ranks=self.ranks))
        try:
            dcp.load(
                state,
                checkpoint_id=uri,
                planner=ExactKeys(expected, uri=uri),
                process_group=self.ranks.control,
            )
        except CheckpointException as error:
            raise _unwrapped(error, doing=f"load {uri}") from error
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def prune(self, saved: Saved, *, keep: int) -> None:
        """Delete committed checkpoints but `saved` and the newest before it; only rank 0 acts.

        What claims a later step than `saved` was passed over when this attempt began, because it
        is damaged. It takes no place from those that are whole, and stays for a person to look at.
        Each loses its marker first, so that one half deleted is never taken for whole.
        """
        if not self.ranks.is_first:
            return
        filesystem, path = open_store(self.prefix)
        older = [entry for entry in newest_first(filesystem, path) if entry.step < saved.step]
        for entry in older[keep - 1 :]:
            folder = join(path, entry.name)
            filesystem.rm_file(join(folder, MARKER))
            filesystem.rm(folder, recursive=True)

    def _commit(self, step: int, uri: str) -> int:
        filesystem, path = open_store(uri)
        try:
            filesystem.invalidate_cache()
            found = filesystem.find(path, detail=True)
            sizes: dict[str, int] = {
                name.rsplit("/", 1)[-1]: info["size"] for name, info in found.items()
            }
            marker = Marker(
                format_version=FORMAT_VERSION,
                run_id=self.run_id,
                fingerprint=self.fingerprint,
                step=step,
                attempt_id=self.attempt_id,
                world_size=self.ranks.world_size,
                device_kind=self.ranks.device.type,
                versions=library_versions(),
                sizes_bytes=sizes,
            )
            content = marker.model_dump_json(indent=2).encode()
            filesystem.pipe_file(join(path, MARKER), content)
        except OSError as error:
            raise CheckpointError(
                f"can't commit {uri}: {error}; it stays without marker"
            ) from error
        return sum(sizes.values()) + len(content)

    def _latest_complete(self) -> Found:
        filesystem, path = open_store(self.prefix)
        skipped: list[Skipped] = []
        try:
            for entry in newest_first(filesystem, path):
                uri = join(self.prefix, entry.name)
                try:
                    content = filesystem.cat_file(join(path, entry.name, MARKER))
                    marker = read_marker(content, uri=uri)
                    check_sizes(marker, entry.sizes_bytes, uri=uri)
                except TornCheckpointError as error:
                    skipped.append(Skipped(uri=uri, reason=str(error)))
                    continue
                check_identity(
                    marker,
                    uri=uri,
                    fingerprint=self.fingerprint,
                    device_kind=self.ranks.device.type,
                )
                return Found(uri, marker.step, marker.versions, tuple(skipped))
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"can't look for checkpoints below {self.prefix}: {error}; give this process "
                "access, or correct checkpoint.root"
            ) from error
        return Found(uri=None, step=None, versions={}, skipped=tuple(skipped))


class ExactKeys(DefaultLoadPlanner):
    """Refuses a checkpoint whose keys are not exactly those of the run.

    torch's planner raises for a missing key but ignores a foreign one, which is how a renamed
    part is lost without a word.
    """

    def __init__(self, expected: Iterable[str], *, uri: str) -> None:
        super().__init__()
        self._expected = set(expected)
        self._uri = uri

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the interface's
    ) -> None:
        """Compare the key sets both ways before anything is read."""
        assert metadata is not None
        found = set(metadata.state_dict_metadata)
        if found != self._expected:
            raise CheckpointError(
                f"{self._uri} does not hold the parts of this run\n"
                f"  missing  {_some(self._expected - found)}\n"
                f"  foreign  {_some(found - self._expected)}\n"
                "  it was written by another version of kettle or for another model"
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _some(keys: set[str]) -> str:
    shown = sorted(keys)[:5]
    more = len(keys) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")


def _unwrapped(error: CheckpointException, *, doing: str) -> CheckpointError:
    """The first rank's own error as a CheckpointError; torch's is no Exception."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, CheckpointError):
        return cause
    return CheckpointError(f"can't {doing}: rank {rank} says {type(cause).__name__}: {cause}")
