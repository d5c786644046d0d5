"""Save and load sharded checkpoints; collective, on any number of ranks.

torch's distributed checkpoint moves the tensors, `protocol` decides what counts. Rank 0 alone holds
the lease and talks to the log; the others are told.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from kettle.checkpoint.background import BackgroundSave
from kettle.checkpoint.digest import Expected
from kettle.checkpoint.events import Ended
from kettle.checkpoint.facts import Found, Identity, Parts, PassedOver, Saved, TakenOver
from kettle.checkpoint.faults import cause_of, load_error, save_error, words
from kettle.checkpoint.filesystem import free_bytes, open_store, store_faults
from kettle.checkpoint.layout import checkpoint_name, join, place_of
from kettle.checkpoint.log import Lease, claim, note_failure
from kettle.checkpoint.marker import FORMAT_VERSION, Marker, check_identity
from kettle.checkpoint.planner import ExactKeys
from kettle.checkpoint.protocol import (
    Candidate,
    Skipped,
    candidates,
    commit,
    delete_objects,
    first_that_loads,
    set_aside_if_stuck,
    settle,
)
from kettle.checkpoint.pruner import Pruner
from kettle.checkpoint.reader import CheckpointReader
from kettle.checkpoint.retention import Policy
from kettle.checkpoint.verified import Verify
from kettle.checkpoint.writer import CheckpointWriter
from kettle.distributed import Ranks, gather_texts, told_by_first
from kettle.errors import (
    KettleError,
    SaveError,
    StoreError,
    SupersededError,
)
from kettle.identity import library_versions

log = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one run, as one attempt sees them.

    Args:
        uri: folder or URI above them.
        ranks: who saves and loads together.
        policies: what retention keeps.
        debris_age_s: how old uncommitted leftovers must be to be deleted.
        verify: what a restore compares.
    """

    def __init__(
        self,
        uri: str,
        *,
        identity: Identity,
        ranks: Ranks,
        policies: Sequence[Policy],
        debris_age_s: float,
        verify: Verify = "digests",
    ) -> None:
        self.uri = uri
        self._filesystem, self._prefix = open_store(uri)
        self._identity = identity
        self._ranks = ranks
        self._verify: Verify = verify
        self._lease: Lease | None = None
        self._generation = 0
        self._tries: Counter[int] = Counter()
        self._last_save_s: float | None = None
        self._background: BackgroundSave[Saved] = BackgroundSave(ranks)
        self._pruner = Pruner(policies=policies, debris_age_s=debris_age_s)

    def take_over(self, *, begin: Literal["newest", "scratch"], after_failures: int) -> TakenOver:
        """Claim the run, so that no older attempt can commit any more; collective.

        Raises:
            NoCheckpointError: attempts crash from the newest checkpoint, and from the one before.
            StoreError: the store can't be read or written to.
        """

        def ask() -> TakenOver:
            lease = claim(
                self._filesystem,
                self._prefix,
                uri=self.uri,
                attempt_id=self._identity.attempt_id,
                begin=begin,
            )
            set_aside_if_stuck(lease, after_failures=after_failures)
            self._lease = lease
            return TakenOver(
                generation=lease.generation,
                conditional_writes="enforced" if lease.enforced else "not_enforced",
                free_bytes=free_bytes(self._filesystem, self._prefix),
            )

        taken = self._told(ask, doing="claim")
        self._generation = taken.generation
        return taken

    def restore(self, parts: Parts) -> Found:
        """Restore every part from the newest checkpoint that is whole; collective.

        Every byte that is read is compared with its digest, unless `verify` says otherwise. A
        checkpoint that doesn't hold is passed over on all ranks alike, and the next one overwrites
        whatever it has left in the parts.

        Raises:
            NoCheckpointError: the run has committed before, and nothing of that holds.
            SupersededError: a newer attempt has claimed the run.
            StoreError: the store can't be read.
            CheckpointError: the newest whole one belongs to another experiment or device, or a key
                is missing or foreign.

        After an error parts may hold a mixture of old and new: the process must not train on.
        """
        restored, skipped = first_that_loads(
            self._candidates(), lambda candidate: self._load(candidate, parts)
        )
        self._told(lambda: settle(self._held(), restored, skipped), doing="log")
        passed_over = tuple(PassedOver(join(self.uri, s.name), s.reason) for s in skipped)
        if restored is None:
            return Found(uri=None, step=None, versions={}, skipped=passed_over)
        if self._verify == "digests":
            self._pruner.verified.add(restored.name)
        return Found(
            uri=join(self.uri, restored.name),
            step=restored.marker.step,
            versions=restored.marker.versions,
            skipped=passed_over,
        )

    def save(self, step: int, parts: Parts) -> Saved:
        """Write all parts as of the last step boundary and commit them; collective.

        Raises:
            SaveError: a rank could not write, or the commit failed.
            SupersededError: a newer attempt has claimed the run.
        """
        assert self._background.step is None
        started = time.monotonic()
        name = self._new_name(step)
        writer = CheckpointWriter(self._filesystem, join(self._prefix, name))
        try:
            dcp.save(tensors_of(parts), storage_writer=writer, process_group=self._ranks.control)
        except CheckpointException as error:
            self._told(lambda: self._remove_debris(name), doing="clean up")
            raise save_error(cause_of(error), uri=join(self.uri, name)) from error

        def finish() -> Saved:
            return self._commit(step, name, writer, started=started, blocked_ms=None)

        return self._told(finish, doing="commit")

    def save_in_background(self, step: int, parts: Parts) -> None:
        """Copy all parts, write the copy and commit it while training goes on; collective.

        No tensor of a part may change before `wait_until_copied` has returned, and only one such
        save may go on: `finish_background` has to be called in between.
        """
        started = time.monotonic()
        name = self._new_name(step)
        cancelled = threading.Event()
        writer = CheckpointWriter(self._filesystem, join(self._prefix, name), cancelled=cancelled)

        def finish(written: Future[object], blocked_ms: Callable[[], float]) -> Saved:
            try:
                written.result()
            except CheckpointException as error:
                self._remove_debris(name)
                raise save_error(cause_of(error), uri=join(self.uri, name)) from error
            return self._commit(step, name, writer, started=started, blocked_ms=blocked_ms())

        self._background.start(
            step, tensors_of(parts), writer=writer, cancelled=cancelled, finish=finish
        )

    def wait_until_copied(self) -> None:
        """Return when the tensors of a background save may change; most often at once."""
        self._background.wait_until_copied()

    @property
    def background_step(self) -> int | None:
        """The step that is being saved in the background, or that waits to be asked for."""
        return self._background.step

    @property
    def expected_save_s(self) -> float | None:
        """How long a save takes, by the last one of this attempt; known to rank 0 alone."""
        return self._last_save_s

    def take_news(self) -> Saved | SaveError | None:
        """How a background save ended, once, as soon as that is known; rank 0 alone gets it."""
        return self._background.take_news()

    def finish_background(self) -> Saved | SaveError:
        """Wait for the background save, and say how it ended; collective.

        Raises:
            SupersededError: a newer attempt has claimed the run.
        """
        return self._background.finish()

    def cancel_background(self) -> None:
        """Ask the background save to give up; `finish_background` still has to be called."""
        self._background.cancel()

    def prune_in_background(self, saved: Saved) -> None:
        """Let retention delete what it doesn't keep, beside training; only rank 0 acts."""
        newest = place_of(saved.uri.rsplit("/", 1)[-1])
        if self._lease is not None and newest is not None:
            self._pruner.start(self._lease, newest=newest)

    def wait_for_retention(self) -> None:
        """Wait until nothing is being deleted any more."""
        self._pruner.wait()

    def leave(self, *, step: int, exit_code: int) -> None:
        """Note in the log that the attempt ends in order; only rank 0 acts, and only if it can."""
        if self._lease is None:
            return
        try:
            with store_faults():
                self._lease.append(Ended(step=step, exit_code=exit_code))
        except OSError as error:
            log.warning("could not note the end of the attempt below %s: %s", self.uri, error)

    def note_failure(self, *, step: int, error: str) -> None:
        """Note in the log that this attempt has crashed, if that can be done; any rank may."""
        try:
            with store_faults():
                note_failure(
                    self._filesystem,
                    self._prefix,
                    attempt_id=self._identity.attempt_id,
                    step=step,
                    error=error,
                )
        except OSError as fault:
            log.warning("could not note the crash below %s: %s", self.uri, fault)

    def _candidates(self) -> Iterator[Candidate | Skipped]:
        """What rank 0 finds, on every rank; collective."""
        found = candidates(self._held()) if self._ranks.is_first else iter(())

        def ask() -> Candidate | Skipped | None:
            candidate = next(found, None)
            if isinstance(candidate, Candidate):
                check_identity(
                    candidate.marker,
                    uri=join(self.uri, candidate.name),
                    fingerprint=self._identity.fingerprint,
                    device_kind=self._ranks.device.type,
                )
            return candidate

        while (candidate := self._told(ask, doing="look for checkpoints")) is not None:
            yield candidate

    def _load(self, candidate: Candidate, parts: Parts) -> None:
        uri = join(self.uri, candidate.name)
        state = tensors_of(parts)
        mine = [f"{name}.{key}" for name, tensors in state.items() for key in tensors]
        expected = set(gather_texts(mine, ranks=self._ranks))
        reader = CheckpointReader(
            self._filesystem,
            join(self._prefix, candidate.name),
            objects=candidate.marker.objects,
            uri=uri,
            verify=self._verify,
        )
        try:
            dcp.load(
                state,
                storage_reader=reader,
                planner=ExactKeys(expected, uri=uri),
                process_group=self._ranks.control,
            )
        except CheckpointException as error:
            raise load_error(cause_of(error), filesystem=self._filesystem, uri=uri) from error
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def _commit(
        self,
        step: int,
        name: str,
        writer: CheckpointWriter,
        *,
        started: float,
        blocked_ms: float | None,
    ) -> Saved:
        marker = Marker(
            format_version=FORMAT_VERSION,
            run_id=self._identity.run_id,
            fingerprint=self._identity.fingerprint,
            step=step,
            attempt_id=self._identity.attempt_id,
            generation=self._generation,
            world_size=self._ranks.world_size,
            device_kind=self._ranks.device.type,
            versions=library_versions(),
            experiment=dict(self._identity.experiment),
            saved_unix_s=time.time(),
            save_ms=(time.monotonic() - started) * 1e3,
            objects={
                name: Expected(size_bytes=written.size_bytes, digest=written.digest)
                for name, written in sorted(writer.objects.items())
            },
        )
        try:
            with store_faults():
                commit(self._held(), marker, name=name)
        except SupersededError:
            raise
        except OSError as error:
            raise save_error(error, uri=join(self.uri, name)) from error
        save_ms = (time.monotonic() - started) * 1e3
        self._last_save_s = save_ms / 1e3
        return Saved(
            step=step,
            uri=join(self.uri, name),
            save_ms=save_ms,
            blocked_ms=save_ms if blocked_ms is None else blocked_ms,
            size_bytes=marker.size_bytes + len(marker.to_bytes()),
        )

    def _remove_debris(self, name: str) -> None:
        """Delete what a failed save has written; best effort, its reason is what matters."""
        if not self._ranks.is_first:
            return
        path = join(self._prefix, name)
        try:
            with store_faults():
                self._filesystem.invalidate_cache()
                found = self._filesystem.ls(path, detail=False)
                names = [each.rsplit("/", 1)[-1] for each in found]
                delete_objects(self._filesystem, path, names)
        except OSError:
            log.debug("left debris in %s", path)

    def _new_name(self, step: int) -> str:
        """A folder that no save has used: one that failed late may be granted all the same."""
        self._tries[step] += 1
        attempt_id = self._identity.attempt_id
        if self._tries[step] > 1:
            attempt_id += f"-try{self._tries[step]}"
        return checkpoint_name(step, generation=self._generation, attempt_id=attempt_id)

    def _held(self) -> Lease:
        assert self._lease is not None
        return self._lease

    def _told(self, ask: Callable[[], T], *, doing: str) -> T:
        """What `ask` gives on rank 0, on every rank, its errors as kettle's own; collective."""

        def asked() -> T:
            try:
                with store_faults():
                    return ask()
            except KettleError:
                raise
            except OSError as error:
                raise StoreError(
                    f"can't {doing} below {self.uri}: {words(error)}; give this process "
                    "access, or correct checkpoint.root"
                ) from error

        return told_by_first(asked, ranks=self._ranks)


def tensors_of(parts: Parts) -> dict[str, Any]:
    """The tensors of all parts as of the last step boundary, by part and key."""
    return {name: dict(part.state_dict()) for name, part in parts.items()}
