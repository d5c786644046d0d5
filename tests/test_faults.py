"""A store that fails: training goes on, or ends with an exit code that says what is lost."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fsspec import AbstractFileSystem

from kettle.checkpoint.catalog import look
from kettle.checkpoint.filesystem import bound_retries, open_store, store_faults, use_endpoint
from kettle.checkpoint.layout import LOG, MARKER, METADATA, checkpoint_name
from kettle.checkpoint.log import claim
from kettle.errors import CheckpointError, NoCheckpointError, SaveError, SupersededError
from kettle.exits import ExitCode
from kettle.records import (
    Alarm,
    CheckpointCommitted,
    CheckpointSkipped,
    Preemption,
    RunCompleted,
    RunStarted,
)
from support import faults
from support.attempts import StopAt, Told, alone, attempt
from support.experiments import noise, tiny
from support.faults import Careless, Down, Failing, Lossy, Slow, Stale
from support.ranks import Ranks, on_ranks
from support.s3 import CountingServer, WireFault, as_s3_client, other_endpoint, s3_server
from support.watched import Operation, Watcher, watched_by

# Nearly all of them train, on a process group of one or two ranks.
pytestmark = pytest.mark.dist

Error = Callable[[], Exception]
T = TypeVar("T")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the uninterrupted run."""
    return digest_of(alone(tiny(tmp_path_factory.mktemp("reference")), noise()))


def digest_of(told: Told) -> str:
    return told.of(RunCompleted)[0].weights_digest


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    as_s3_client(monkeypatch)


@pytest.fixture
def wire(aws: None) -> Iterator[CountingServer]:  # noqa: ARG001
    """The server in this process, whose wire can be cut."""
    with s3_server() as server:
        use_endpoint(server.endpoint)
        open_store(f"s3://{server.bucket}")[0].mkdir(server.bucket)
        yield server


@pytest.fixture
def s3_root(aws: None) -> Iterator[str]:  # noqa: ARG001
    """A bucket: of the server that KETTLE_S3_ENDPOINT names, or of one in this process."""
    with ExitStack() as stack:
        endpoint = other_endpoint() or stack.enter_context(s3_server()).endpoint
        use_endpoint(endpoint)
        bucket = f"checkpoints-{uuid.uuid4().hex[:8]}"
        filesystem = open_store(f"s3://{bucket}")[0]
        filesystem.mkdir(bucket)
        yield f"s3://{bucket}/runs"
        filesystem.rm(bucket, recursive=True)


@pytest.fixture(params=["file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the checkpoints lie."""
    if request.param == "file":
        return str(tmp_path / "runs")
    return str(request.getfixturevalue("s3_root"))


def run(root: str, watcher: Watcher, *, every: int = 3, **options: Any) -> Told:
    """One attempt whose store the watcher stands before."""
    settings = options.pop("settings", {})
    with watched_by(watcher, root) as uri:
        return alone(tiny(uri, checkpoint__every=every, **settings), noise(), **options)


def resumed(root: str, *, name: str = "after", **options: Any) -> Told:
    """The next attempt, over a store without a fault."""
    return alone(tiny(root, checkpoint__every=3), noise(), name=name, **options)


def store(root: str) -> tuple[AbstractFileSystem, str]:
    """The filesystem, and the prefix of the only run."""
    filesystem, path = open_store(root)
    filesystem.invalidate_cache()
    (prefix,) = filesystem.ls(path, detail=False)
    return filesystem, prefix


def folders(root: str) -> list[tuple[int, bool]]:
    """Step of each checkpoint's folder, and whether it has a marker."""
    return [(f.place.step, f.has_marker) for f in reversed(look(*store(root)).folders)]


# A periodic save fails.

FAILURES: dict[str, Callable[[], Failing]] = {
    "open": lambda: Failing("open", inside="step-00000006"),
    "write": lambda: Failing("write", inside="step-00000006"),
    "close": lambda: Failing("close", inside="step-00000006"),
    "metadata": lambda: Failing("overwrite", inside=METADATA, first=2),
    # After the claim, the question whether creating is conditional, and the grant of step 3.
    "grant": lambda: Failing("create", inside=LOG, first=4),
    "marker": lambda: Failing("overwrite", inside=MARKER, first=2),
}


WAYS = [(name, "sync") for name in FAILURES] + [(name, "async") for name in ("write", "marker")]


@pytest.mark.parametrize(("name", "periodic"), WAYS)
def test_periodic_save_that_fails_is_an_alarm_and_training_goes_on(
    root: str, reference: str, name: str, periodic: str
) -> None:
    failing = FAILURES[name]()
    told = run(root, failing, settings={"checkpoint__periodic": periodic})
    assert failing.failed == 1
    (alarm,) = told.of(Alarm)
    assert (alarm.kind, told.exit_code) == ("save_failed", ExitCode.OK)
    assert [c.step for c in told.of(CheckpointCommitted)] == [3, 9]
    assert digest_of(told) == reference


ERRORS = [
    faults.no_access,
    faults.slow_down,
    faults.unreachable,
    faults.refused_by_server,
    faults.no_answer,
    faults.reset,
    faults.disk_is_full,
    faults.quota_is_reached,
]


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_the_store_says_training_goes_on(
    tmp_path: Path, reference: str, error: Error
) -> None:
    told = run(str(tmp_path), Failing("write", error, inside="step-00000006"))
    (alarm,) = told.of(Alarm)
    assert str(error()) in alarm.message
    assert (told.exit_code, digest_of(told)) == (ExitCode.OK, reference)


def test_full_disk_is_named_with_its_remedy(root: str) -> None:
    told = run(root, Failing("write", faults.disk_is_full, inside="step-00000006"))
    (alarm,) = told.of(Alarm)
    assert "No space left on device; make room, or lower checkpoint.keep" in alarm.message
    assert "step-00000006" in alarm.message


def test_lost_credentials_are_named_with_their_remedy(root: str) -> None:
    told = run(root, Failing("write", faults.no_access, inside="step-00000006"))
    (alarm,) = told.of(Alarm)
    assert "403" in alarm.message
    assert "renew the credentials" in alarm.message


def test_full_disk_costs_neither_the_older_checkpoint_nor_room(root: str) -> None:
    full = Failing("write", faults.disk_is_full, inside="step-00000006")
    run(root, full, stop=StopAt(7), settings={"checkpoint__keep": 9})
    assert folders(root) == [(3, True), (6, True)]  # of step 6: the one of the eviction


def test_debris_of_a_save_without_room_is_removed_at_once(root: str) -> None:
    full = Failing("write", faults.disk_is_full, inside="step-00000006", count=99)
    told = run(root, full, stop=StopAt(7))
    assert told.exit_code == ExitCode.NOT_SAVED
    assert folders(root) == [(3, True)]


def test_answer_that_is_lost_costs_no_commit(root: str, reference: str) -> None:
    lost = Failing("create", faults.no_answer, inside=LOG, first=4, answer_lost=True)
    told = run(root, lost)
    assert lost.failed == 1
    assert told.of(Alarm) == []
    assert [c.step for c in told.of(CheckpointCommitted)] == [3, 6, 9]
    assert digest_of(told) == reference


@pytest.mark.parametrize("kind", ["list", "delete"])
def test_retention_that_fails_is_no_matter_for_training(
    root: str, reference: str, kind: Any
) -> None:
    first = 3 if kind == "list" else 1
    told = run(root, Failing(kind, first=first, count=99), settings={"checkpoint__keep": 1})
    assert (told.exit_code, digest_of(told)) == (ExitCode.OK, reference)


def test_last_save_that_fails_ends_with_74(root: str) -> None:
    with pytest.raises(SaveError) as refused:
        run(root, Failing("write", inside="step-00000009"))
    assert refused.value.exit_code == ExitCode.NOT_SAVED


def test_store_that_cannot_be_claimed_ends_the_attempt(root: str) -> None:
    with pytest.raises(CheckpointError, match="can't claim below torn://"):
        run(root, Failing("create", faults.no_access))


def test_store_that_cannot_be_read_for_a_while_costs_no_checkpoint(root: str) -> None:
    resumed(root, name="first", stop=StopAt(7))
    for name in ("second", "third", "fourth", "fifth"):
        with pytest.raises(CheckpointError, match="can't load"):
            run(root, Failing("read", faults.slow_down, inside="__0_0", count=99), name=name)
    last = resumed(root, name="last")
    assert (last.resumed_from, last.of(CheckpointSkipped)) == (6, [])


# An eviction.


@pytest.mark.parametrize("periodic", ["sync", "async"])
def test_eviction_ends_with_74_where_the_store_is_down(
    root: str, reference: str, periodic: str
) -> None:
    down = Down()

    def stop(*, step: int, micro_batch: int) -> float | None:
        while step == 5 and not down.is_down:  # the save of step 3 may be under way
            down.is_down = (3, True) in folders(root)
        return StopAt(6)(step=step, micro_batch=micro_batch)

    told = run(root, down, stop=stop, settings={"checkpoint__periodic": periodic})
    preemption = told.of(Preemption)[0]
    assert told.exit_code == preemption.exit_code == ExitCode.NOT_SAVED
    assert preemption.outcome == "not_saved"
    after = resumed(root)
    assert (after.resumed_from, digest_of(after)) == (3, reference)


def test_eviction_ends_with_75_where_the_step_is_covered_already(root: str) -> None:
    down = Down()

    def stop(*, step: int, micro_batch: int) -> float | None:
        down.is_down = down.is_down or step == 4
        return StopAt(4)(step=step, micro_batch=micro_batch)

    told = run(root, down, stop=stop)
    assert told.exit_code == ExitCode.PREEMPTED
    assert told.of(Preemption)[0].outcome == "already_saved"


@pytest.mark.parametrize("kind", ["write", "create", "overwrite"])
def test_eviction_is_never_a_success_without_a_checkpoint(root: str, kind: Any) -> None:
    first = {"write": 1, "create": 3, "overwrite": 1}[kind]
    told = run(root, Failing(kind, first=first, count=99), every=99, stop=StopAt(5))
    assert told.exit_code == ExitCode.NOT_SAVED
    assert told.of(CheckpointCommitted) == []
    assert told.of(Preemption)[0].checkpoint_uri is None


def test_checkpoint_whose_marker_failed_is_healed_by_the_next_attempt(
    root: str, reference: str
) -> None:
    told = run(root, Failing("overwrite", inside=MARKER), every=99, stop=StopAt(5))
    assert told.exit_code == ExitCode.NOT_SAVED
    after = resumed(root)
    assert after.of(CheckpointSkipped) == []
    assert (after.resumed_from, digest_of(after)) == (4, reference)


class SecondMarkerFails(Watcher):
    """And after that nothing more is written, once the test says so."""

    def __init__(self) -> None:
        self.is_full = False
        self._markers = Failing("overwrite", inside=MARKER, first=2)

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        if self.is_full and operation.kind == "write":
            raise faults.disk_is_full()
        return self._markers.around(operation, act)


def test_checkpoint_whose_marker_failed_outlives_a_second_try_that_fails(root: str) -> None:
    fails = SecondMarkerFails()

    def stop(*, step: int, micro_batch: int) -> float | None:
        fails.is_full = fails.is_full or step == 7
        return StopAt(7)(step=step, micro_batch=micro_batch)

    told = run(root, fails, stop=stop)
    assert told.exit_code == ExitCode.NOT_SAVED
    assert resumed(root).resumed_from == 6


# What is kept is not what was written.

DAMAGES = [
    ("step-00000006-g0001-attempt/__0_0", faults.without_tail, "bytes and should have"),
    ("step-00000006-g0001-attempt/__0_0", faults.with_a_flipped_bit, "damaged in block 0"),
    (f"step-00000006-g0001-attempt/{METADATA}", faults.without_tail, "bytes and should have"),
    (f"step-00000006-g0001-attempt/{METADATA}", faults.with_a_flipped_bit, "digest"),
    (f"step-00000006-g0001-attempt/{MARKER}", faults.without_tail, "the marker can't be read"),
]


@pytest.mark.parametrize(("inside", "change", "reason"), DAMAGES)
def test_damaged_content_is_skipped_with_its_reason(
    root: str, reference: str, inside: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    lossy = Lossy(change, inside=inside)
    run(root, lossy, stop=StopAt(7))
    assert lossy.changed
    after = resumed(root)
    (skipped,) = after.of(CheckpointSkipped)
    assert "step-00000006" in skipped.checkpoint_uri
    assert reason in skipped.reason
    assert (after.resumed_from, digest_of(after)) == (3, reference)


def test_nothing_usable_is_refused_with_3(root: str) -> None:
    run(root, Lossy(faults.with_a_flipped_bit, inside="__0_0"), stop=StopAt(7))
    with pytest.raises(NoCheckpointError, match="damaged in block 0") as refused:
        resumed(root)
    assert refused.value.exit_code == ExitCode.NO_CHECKPOINT


def test_only_a_begin_from_scratch_starts_again_from_nothing(root: str, reference: str) -> None:
    run(root, Lossy(faults.with_a_flipped_bit, inside="__0_0"), stop=StopAt(7))
    again = resumed(root, begin="scratch")
    assert (again.resumed_from, digest_of(again)) == (None, reference)


# Slow stores, and such as show what was.


def test_slow_store_changes_nothing(tmp_path: Path, reference: str) -> None:
    assert digest_of(run(str(tmp_path), Slow(0.02))) == reference


def test_listing_that_is_out_of_date_hides_no_commit(root: str, reference: str) -> None:
    stale = Stale()
    run(root, stale, stop=StopAt(5), name="first")
    second = run(root, stale, name="second", stop=StopAt(7))
    third = run(root, stale, name="third")
    assert (second.resumed_from, third.resumed_from) == (4, 6)
    assert digest_of(third) == reference


# Debris of a killed save.


def debris(*names: str, content: bytes = b"wei") -> dict[str, bytes]:
    return dict.fromkeys(names, content)


DEBRIS = {
    "shards": debris("__0_0.distcp", "__1_0.distcp"),
    "lock files": debris("__0_0.distcp.lock", ".lock"),
    "metadata alone": debris(METADATA),
    "empty marker": debris("__0_0.distcp", METADATA) | debris(MARKER, content=b""),
    "more shards than ranks": debris(*(f"__{rank}_0.distcp" for rank in range(7)), METADATA),
}


def litter(root: str, step: int, leftovers: dict[str, bytes]) -> None:
    """Into the folder that generation 2 will take for this step, and into one beside it."""
    filesystem, prefix = store(root)
    for name in (
        checkpoint_name(step, generation=2, attempt_id="after"),
        checkpoint_name(step, generation=1, attempt_id="killed"),
    ):
        for inside, content in leftovers.items():
            filesystem.pipe_file(f"{prefix}/{name}/{inside}", content)


@pytest.mark.parametrize("leftovers", DEBRIS.values(), ids=DEBRIS)
def test_saving_again_over_debris_succeeds(
    root: str, reference: str, leftovers: dict[str, bytes]
) -> None:
    alone(tiny(root), noise(), stop=StopAt(5))
    litter(root, 6, leftovers)
    told = resumed(root, stop=StopAt(7))
    assert [c.step for c in told.of(CheckpointCommitted)] == [6]
    last = resumed(root, name="last")
    assert last.of(CheckpointSkipped) == []
    assert (last.resumed_from, digest_of(last)) == (6, reference)


def attempt_on_ranks(ranks: Ranks, root: str, name: str, stop: int) -> Told:
    return attempt(
        tiny(root, checkpoint__every=3), noise(), ranks=ranks, name=name, stop=StopAt(stop)
    )


@pytest.mark.dist
def test_saving_again_over_debris_succeeds_on_two_ranks(tmp_path: Path, reference: str) -> None:
    root = str(tmp_path / "runs")
    on_ranks(2, attempt_on_ranks, root, "first", 5)
    litter(root, 6, {n: c for leftovers in DEBRIS.values() for n, c in leftovers.items()})
    told = on_ranks(2, attempt_on_ranks, root, "after", 7)
    assert [c.step for c in told[0].of(CheckpointCommitted)] == [6]
    last = on_ranks(2, attempt_on_ranks, root, "last", 99)
    assert (last[0].resumed_from, digest_of(last[0])) == (6, reference)


def attempt_that_fails_on_one(ranks: Ranks, root: str, rank: int) -> Told:
    failing = Failing("write", faults.disk_is_full, inside="step-00000003")
    watcher = failing if ranks.rank == rank else Watcher()
    with watched_by(watcher, root) as uri:
        return attempt(tiny(uri, checkpoint__every=3), noise(), ranks=ranks)


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(
    tmp_path: Path, reference: str, rank: int
) -> None:
    told = on_ranks(2, attempt_that_fails_on_one, str(tmp_path / "runs"), rank)
    for of_rank in told:
        assert [alarm.step for alarm in of_rank.of(Alarm)] == [3]
        assert digest_of(of_rank) == reference


# Conditional writes that are not enforced.


def test_conditional_writes_that_are_not_enforced_are_told_once_an_attempt(
    root: str, reference: str
) -> None:
    told = run(root, Careless())
    assert told.of(RunStarted)[0].conditional_writes == "not_enforced"
    (alarm,) = told.of(Alarm)
    assert alarm.kind == "conditional_writes_not_enforced"
    assert digest_of(told) == reference


def test_conditional_writes_are_found_to_be_enforced(root: str) -> None:
    told = run(root, Watcher())
    assert told.of(RunStarted)[0].conditional_writes == "enforced"
    assert told.of(Alarm) == []


def taking_over(root: str, watcher: Watcher, *, at: int) -> Callable[..., None]:
    """A stop source that never stops, and lets a newer attempt claim the run before a step."""

    def source(*, step: int, micro_batch: int) -> None:
        if (step, micro_batch) == (at, 0):
            with watched_by(watcher, root, case="newer") as uri:
                filesystem, path = open_store(uri)
                (prefix,) = filesystem.inner.ls(path, detail=False)
                claim(filesystem, prefix, uri=prefix, attempt_id="newer")

    return source


def test_attempts_in_sequence_are_fenced_without_conditional_writes(root: str) -> None:
    stop = taking_over(root, Careless(), at=5)
    with pytest.raises(SupersededError, match="attempt newer"):
        run(root, Careless(), stop=stop)
    assert [step for step, has_marker in folders(root) if has_marker] == [3]


def test_server_that_ignores_conditions_is_found_out(wire: CountingServer, reference: str) -> None:
    wire.ignores_conditions = True
    told = resumed(f"s3://{wire.bucket}/runs")
    assert told.of(RunStarted)[0].conditional_writes == "not_enforced"
    assert [alarm.kind for alarm in told.of(Alarm)] == ["conditional_writes_not_enforced"]
    assert digest_of(told) == reference


def test_attempts_in_sequence_are_fenced_by_a_server_that_ignores_conditions(
    wire: CountingServer,
) -> None:
    wire.ignores_conditions = True
    root = f"s3://{wire.bucket}/runs"
    with pytest.raises(SupersededError, match="attempt newer"):
        resumed(root, stop=taking_over(root, Watcher(), at=5))
    assert [step for step, has_marker in folders(root) if has_marker] == [3]


# On the wire.

SHORT = 10.0
"""Seconds of grace: the client gives up after half of it."""

TRANSIENT = [
    ("503", "PUT /", "__0_0.distcp"),
    ("503", "PUT /", MARKER),
    ("503", "PUT /", LOG),
    ("503", "GET /", "list-type=2"),
    ("reset", "PUT /", "__0_0.distcp"),
    ("reset", "PUT /", LOG),
    ("lost", "PUT /", "__0_0.distcp"),
    ("lost", "PUT /", MARKER),
    ("lost", "PUT /", LOG),
    ("silence", "PUT /", LOG),
]


@pytest.mark.parametrize(("kind", "method", "inside"), TRANSIENT)
def test_transient_fault_on_the_wire_is_overcome_by_the_client(
    wire: CountingServer, reference: str, kind: Any, method: str, inside: str
) -> None:
    bound_retries(SHORT)
    fault = WireFault(method=method, inside=inside, count=2 if kind == "503" else 1, kind=kind)
    wire.faults.append(fault)
    told = resumed(f"s3://{wire.bucket}/runs")
    assert fault.seen
    assert told.of(Alarm) == []
    assert [c.step for c in told.of(CheckpointCommitted)] == [3, 6, 9]
    assert digest_of(told) == reference


@pytest.mark.parametrize("kind", ["503", "reset"])
def test_lasting_fault_on_the_wire_is_an_alarm_and_training_goes_on(
    wire: CountingServer, reference: str, kind: Any
) -> None:
    bound_retries(SHORT)
    wire.faults.append(
        WireFault(method="PUT /", inside="step-00000006-g0001-after/__0", count=99, kind=kind)
    )
    told = resumed(f"s3://{wire.bucket}/runs")
    (alarm,) = told.of(Alarm)
    assert "step-00000006" in alarm.message
    assert (told.exit_code, digest_of(told)) == (ExitCode.OK, reference)


@pytest.mark.parametrize("kind", ["503", "reset", "silence"])
def test_client_gives_up_within_half_of_the_grace_period(wire: CountingServer, kind: Any) -> None:
    bound_retries(SHORT)
    filesystem, path = open_store(f"s3://{wire.bucket}/object")
    filesystem.pipe_file(path, b"there is a connection")
    wire.faults.append(WireFault(method="PUT /", inside="object", count=99, kind=kind))
    started = time.monotonic()
    with pytest.raises(OSError, match=r".*"), store_faults():
        filesystem.pipe_file(path, b"x")
    assert time.monotonic() - started < SHORT / 2 + 0.5
    assert wire.faults[0].seen > 1
