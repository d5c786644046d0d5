"""Attempts that meet in one run: taken over, crashing from one checkpoint, begun again."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kettle.checkpoint.events import LogState, Released
from kettle.checkpoint.facts import TakenOver
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import MARKER
from kettle.checkpoint.log import claim, note, read_tail
from kettle.checkpoint.store import CheckpointStore
from kettle.distributed import process_group
from kettle.errors import NoCheckpointError, SupersededError
from kettle.records import Alarm, CheckpointCommitted, CheckpointSkipped, RunCompleted, RunStarted
from kettle.train.run import Run
from support.attempts import Change, StopAt, Told, alone, attempt, compared
from support.experiments import noise, tiny


def prefix_of(root: Path) -> Path:
    (prefix,) = root.iterdir()
    return prefix


def state_of(root: Path) -> LogState:
    return read_tail(*open_store(str(prefix_of(root)))).state


# Taken over.


def when(step: int, act: Callable[[], object]) -> Callable[..., float | None]:
    """A stop source that never stops, and does something before a step."""

    def source(*, step: int, micro_batch: int, _at: int = step) -> float | None:
        if (step, micro_batch) == (_at, 0):
            act()
        return None

    return source


def test_attempt_that_was_taken_over_commits_nothing_more(tmp_path: Path) -> None:
    def take_over() -> None:
        prefix = str(prefix_of(tmp_path))
        claim(*open_store(prefix), uri=prefix, attempt_id="newer")

    config = tiny(tmp_path, checkpoint__every=3)
    with pytest.raises(SupersededError, match=r"attempt newer \(generation 2\) has taken the run"):
        alone(config, noise(), stop=when(5, take_over), name="older")
    committed = [path.parent.name for path in tmp_path.rglob(MARKER)]
    assert committed == ["step-00000003-g0001-older"]


def test_attempt_that_was_taken_over_at_its_eviction_does_not_say_75(tmp_path: Path) -> None:
    def stop(*, step: int, micro_batch: int) -> float | None:
        if (step, micro_batch) != (5, 0):
            return None
        prefix = str(prefix_of(tmp_path))
        claim(*open_store(prefix), uri=prefix, attempt_id="newer")
        return time.monotonic()

    with pytest.raises(SupersededError) as refused:
        alone(tiny(tmp_path), noise(), stop=stop)
    assert refused.value.exit_code == 4


def test_two_attempts_alive_at_once_end_as_one_alone(tmp_path: Path) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    config = tiny(tmp_path / "trial", checkpoint__every=2)
    told: list[Told] = []
    with process_group("cpu", timeout_s=60) as ranks:

        def newer() -> None:
            told.append(attempt(config, noise(), ranks=ranks, name="newer"))

        with pytest.raises(SupersededError):
            attempt(config, noise(), ranks=ranks, name="older", stop=when(4, newer))
    assert told[0].resumed_from == 2
    assert compared(reference, told[0]).identical
    assert told[0].of(RunStarted)[0].generation == 2


# Crashing from one checkpoint.


class InjectedFailureError(Exception):
    """Raised by the data of a test."""


def crashing_in(*steps: int) -> Change:
    """Before its first micro-batch of these steps the rank crashes."""

    def change(run: Run) -> Run:
        ask = run.stop

        def stop(*, step: int, micro_batch: int) -> float | None:
            if step in steps:
                raise InjectedFailureError(f"step {step} is cursed")
            return ask(step=step, micro_batch=micro_batch)

        return dataclasses.replace(run, stop=stop)

    return change


def crash(root: Path, *steps: int, name: str, **options: object) -> None:
    config = tiny(root, checkpoint__every=2, checkpoint__quarantine_after=3, **options)
    with pytest.raises(InjectedFailureError):
        alone(config, noise(), name=name, change=crashing_in(*steps))


def crashed_three_times(root: Path) -> None:
    """Steps 2 and 4 are committed, and three attempts in a row have crashed in step 6."""
    for name in ("first", "second", "third"):
        crash(root, 6, name=name)


def test_checkpoint_from_which_attempts_keep_crashing_is_quarantined(tmp_path: Path) -> None:
    crashed_three_times(tmp_path)
    fourth = alone(tiny(tmp_path, checkpoint__every=2), noise(), name="fourth")
    assert fourth.resumed_from == 2
    (skipped,) = fourth.of(CheckpointSkipped)
    assert skipped.checkpoint_uri.endswith("step-00000004-g0001-first")
    assert "3 attempts in a row crashed from it after step 5: step 6 is cursed" in skipped.reason


def test_run_that_gets_past_its_quarantine_ends_bit_identical(tmp_path: Path) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    crashed_three_times(tmp_path / "trial")
    config = tiny(tmp_path / "trial", checkpoint__every=2)
    assert compared(reference, alone(config, noise(), name="fourth")).identical
    assert state_of(tmp_path / "trial").last_chance is None


def test_quarantined_checkpoint_is_kept(tmp_path: Path) -> None:
    crashed_three_times(tmp_path)
    alone(tiny(tmp_path, checkpoint__every=1, checkpoint__keep=1), noise(), name="fourth")
    kept = {path.parent.name for path in tmp_path.rglob(MARKER)}
    assert kept == {"step-00000004-g0001-first", "step-00000009-g0004-fourth"}


def test_crashes_at_different_steps_are_no_reason_for_a_quarantine(tmp_path: Path) -> None:
    for step, name in ((6, "first"), (5, "second"), (6, "third")):
        crash(tmp_path, step, name=name)
    assert alone(tiny(tmp_path), noise(), name="fourth").resumed_from == 4


def test_attempt_that_was_evicted_in_between_does_not_reset_the_count(tmp_path: Path) -> None:
    crash(tmp_path, 6, name="first")
    crash(tmp_path, 6, name="second")
    alone(tiny(tmp_path), noise(), name="evicted", stop=StopAt(5))
    crash(tmp_path, 6, name="third")
    assert alone(tiny(tmp_path), noise(), name="fourth").resumed_from == 2


def test_run_that_crashes_from_the_older_checkpoint_too_stops_with_the_reason(
    tmp_path: Path,
) -> None:
    crashed_three_times(tmp_path)
    crash(tmp_path, 6, name="fourth")
    with pytest.raises(NoCheckpointError, match=r"crashes from older(.|\n)*step 6 is cursed") as no:
        alone(tiny(tmp_path), noise(), name="fifth")
    assert no.value.exit_code == 3
    assert "step-00000004-g0001-first" in str(no.value)


def test_released_checkpoint_is_used_again(tmp_path: Path) -> None:
    crashed_three_times(tmp_path)
    crash(tmp_path, 3, name="fourth")
    filesystem, prefix = open_store(str(prefix_of(tmp_path)))
    name = "step-00000004-g0001-first"
    note(filesystem, prefix, Released(name=name), attempt_id="a person")
    assert alone(tiny(tmp_path), noise(), name="fifth").resumed_from == 4


# Nothing usable.


def damaged(root: Path) -> None:
    """A run whose only checkpoint, of step 4, has lost its last byte."""
    told = alone(tiny(root), noise(), stop=StopAt(5))
    (shard,) = Path(told.last_checkpoint).glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])


def test_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path: Path) -> None:
    damaged(tmp_path)
    with pytest.raises(NoCheckpointError, match=r"__0_0\.distcp has \d+ bytes and should") as no:
        alone(tiny(tmp_path), noise(), name="second")
    assert no.value.exit_code == 3
    assert "--from-scratch" in str(no.value)


def test_run_whose_checkpoints_are_all_gone_does_not_begin_again(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(5))
    for path in Path(told.last_checkpoint).iterdir():
        path.unlink()
    with pytest.raises(NoCheckpointError, match="marker is missing"):
        alone(tiny(tmp_path), noise(), name="second")


def test_run_begins_again_when_it_is_told_to(tmp_path: Path) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    damaged(tmp_path / "trial")
    told = alone(tiny(tmp_path / "trial"), noise(), name="second", begin="scratch")
    assert told.resumed_from is None
    digests = [t.of(RunCompleted)[0].weights_digest for t in (reference, told)]
    assert digests[0] == digests[1]


def test_run_that_began_again_does_not_return_to_what_it_left_behind(tmp_path: Path) -> None:
    alone(tiny(tmp_path, checkpoint__every=2), noise(), stop=StopAt(8))
    told = alone(tiny(tmp_path), noise(), name="second", begin="scratch", stop=StopAt(4))
    for path in Path(told.last_checkpoint).iterdir():
        path.unlink()
    with pytest.raises(NoCheckpointError):
        alone(tiny(tmp_path), noise(), name="third")


def test_run_without_any_commit_begins_at_0_over_the_debris(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(1))
    assert not told.of(CheckpointCommitted)
    debris = prefix_of(tmp_path) / "step-00000004-g0001-attempt"
    debris.mkdir()
    (debris / "__0_0.distcp").write_bytes(b"half")
    assert alone(tiny(tmp_path), noise(), name="second").resumed_from is None


# A store that is nearly full.


@dataclasses.dataclass
class NearlyFull:
    """A store that has room for a few bytes, as far as it says."""

    store: CheckpointStore

    def take_over(self, **options: Any) -> TakenOver:
        return dataclasses.replace(self.store.take_over(**options), free_bytes=100_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def nearly_full(run: Run) -> Run:
    return dataclasses.replace(run, store=cast("CheckpointStore", NearlyFull(run.store)))


def test_store_with_little_space_is_an_alarm_before_the_first_save(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), change=nearly_full)
    kinds = [record.event for record in told.records]
    assert kinds.index("alarm") < kinds.index("step")
    (alarm,) = told.of(Alarm)
    assert alarm.kind == "little_space"
    assert "make room, or lower checkpoint.keep" in alarm.message


def test_store_with_room_enough_is_no_alarm(tmp_path: Path) -> None:
    assert not alone(tiny(tmp_path), noise()).of(Alarm)
