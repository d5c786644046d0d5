"""The run's log: what follows from its entries, and who may add one."""

from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.events import (
    Claimed,
    Committed,
    Ended,
    Event,
    Failed,
    LogState,
    Quarantined,
    Released,
    Restored,
    after,
)
from kettle.checkpoint.layout import LOG, checkpoint_name, entry_name
from kettle.checkpoint.log import Lease, claim, entry_numbers, note, note_failure, read_tail
from kettle.errors import SupersededError
from support.checkpoints import marker


def name(step: int, generation: int = 1) -> str:
    return checkpoint_name(step, generation=generation, attempt_id="a")


def commit(step: int) -> Committed:
    return Committed(name=name(step), marker=marker(step=step))


def state_of(*events: Event) -> LogState:
    state = LogState()
    for number, event in enumerate(events, start=1):
        state = after(state, event, number=number, attempt_id=f"attempt{number}")
    return state


# What follows.


def test_claim_takes_the_next_generation() -> None:
    state = state_of(Claimed(), Claimed())
    assert (state.generation, state.attempt_id) == (2, "attempt2")


def test_newest_commit_is_where_to_resume_from() -> None:
    assert state_of(Claimed(), commit(3), commit(6)).newest == name(6)


def test_commit_is_unproven_until_its_attempt_goes_on_or_ends() -> None:
    assert state_of(Claimed(), commit(3)).unproven == 2
    assert state_of(Claimed(), commit(3), commit(6)).unproven == 3
    assert state_of(Claimed(), commit(3), Ended(step=3, exit_code=75)).unproven is None


def test_restored_checkpoint_is_the_newest_though_a_damaged_one_is_newer() -> None:
    state = state_of(
        Claimed(), commit(3), commit(6), Restored(name=name(3), damaged={name(6): "x"})
    )
    assert (state.newest, state.damaged) == (name(3), {name(6): "x"})


def test_beginning_from_scratch_leaves_everything_behind_but_what_is_set_aside() -> None:
    state = state_of(
        Claimed(), commit(3), Quarantined(name=name(3), reason="x"), Claimed(from_scratch=True)
    )
    assert (state.newest, state.from_generation, state.last_chance) == (None, 2, None)
    assert name(3) in state.quarantined


def failed(step: int | None) -> Failed:
    return Failed(step=step, error="x")


def count_of(*events: Event) -> int:
    failures = state_of(*events).failures
    return 0 if failures is None else failures.count


def test_crashes_in_a_row_from_one_checkpoint_at_one_step_are_counted() -> None:
    row: list[Event] = [Claimed(), commit(3), failed(5), Claimed(), failed(5), Claimed(), failed(5)]
    assert count_of(*row) == 3


@pytest.mark.parametrize(
    "between", [[commit(4)], [failed(6), Claimed()], [failed(None), Claimed()]], ids=str
)
def test_progress_or_another_step_begins_the_count_anew(between: list[Event]) -> None:
    assert count_of(Claimed(), commit(3), failed(5), Claimed(), *between, failed(5)) == 1


def test_ranks_that_crash_in_one_attempt_count_once() -> None:
    assert count_of(Claimed(), commit(3), failed(5), failed(5)) == 1


def test_last_chance_is_over_with_a_commit_beyond_the_crash_only() -> None:
    stuck: list[Event] = [Claimed(), commit(3), failed(5)]
    stuck += [Quarantined(name=name(3), reason="x"), Claimed()]
    assert state_of(*stuck, commit(5)).last_chance is not None
    assert state_of(*stuck, commit(6)).last_chance is None


def test_release_undoes_a_quarantine() -> None:
    state = state_of(
        Claimed(), commit(3), Quarantined(name=name(3), reason="x"), Released(name=name(3))
    )
    assert (state.quarantined, state.last_chance, state.failures) == ({}, None, None)


# Who may add one.


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[AbstractFileSystem, str]:
    if request.param == "local":
        return DurableLocalFileSystem(), str(tmp_path)
    return MemoryFileSystem(), f"/{tmp_path.name}"


Place = tuple[AbstractFileSystem, str]


def claimed(place: Place, attempt_id: str) -> Lease:
    return claim(*place, uri="uri", attempt_id=attempt_id)


def test_log_of_a_new_run_is_empty(place: Place) -> None:
    assert read_tail(*place).number == 0


def test_entries_are_numbered_without_a_gap(place: Place) -> None:
    lease = claimed(place, "a")
    lease.append(commit(1))
    claimed(place, "b").append(commit(2))
    assert entry_numbers(*place) == [1, 2, 3, 4]


def test_store_that_refuses_to_create_again_enforces_conditional_writes(place: Place) -> None:
    assert claimed(place, "a").enforced


def test_superseded_writer_is_refused_and_told_by_whom(place: Place) -> None:
    older = claimed(place, "older")
    claimed(place, "newer")
    with pytest.raises(SupersededError, match=r"older \(generation 1\).*newer \(generation 2\)"):
        older.append(commit(1))
    assert read_tail(*place).state.newest is None


def test_superseded_writer_stays_refused(place: Place) -> None:
    older = claimed(place, "older")
    claimed(place, "newer")
    for _ in range(2):
        with pytest.raises(SupersededError):
            older.append(commit(1))


def test_word_from_outside_does_not_cost_the_lease(place: Place) -> None:
    lease = claimed(place, "a")
    lease.append(commit(1))
    note(*place, Released(name=name(1)), attempt_id="a person")
    lease.append(commit(2))
    assert read_tail(*place).state.newest == name(2)


def test_crash_of_an_attempt_that_holds_the_run_is_noted_once(place: Place) -> None:
    claimed(place, "a")
    for rank in (0, 1):
        note_failure(*place, attempt_id="a", step=4, error=f"rank {rank}")
    failures = read_tail(*place).state.failures
    assert failures is not None
    assert (failures.count, failures.error) == (1, "rank 0")
    assert entry_numbers(*place) == [1, 2]


def test_crash_of_an_attempt_that_was_superseded_is_not_noted(place: Place) -> None:
    claimed(place, "older")
    claimed(place, "newer")
    note_failure(*place, attempt_id="older", step=4, error="x")
    assert read_tail(*place).state.failures is None


def spoil(place: Place, number: int) -> None:
    filesystem, prefix = place
    filesystem.pipe_file(f"{prefix}/{LOG}/{entry_name(number)}", b"")


def test_entry_that_a_disk_has_lost_keeps_its_number(place: Place) -> None:
    lease = claimed(place, "a")
    lease.append(commit(1))
    lease.append(commit(2))
    spoil(place, 3)
    tail = read_tail(*place)
    assert (tail.number, tail.state.newest) == (3, name(1))


def test_claim_that_a_disk_has_lost_fences_nobody_out_of_the_next_one(place: Place) -> None:
    claimed(place, "first")
    lost = claimed(place, "lost")
    spoil(place, 2)
    claimed(place, "third")
    with pytest.raises(SupersededError):
        lost.append(commit(1))


def test_foreign_objects_in_the_log_are_not_entries(place: Place) -> None:
    claimed(place, "a")
    filesystem, prefix = place
    filesystem.pipe_file(f"{prefix}/{LOG}/notes.txt", b"mine")
    assert entry_numbers(*place) == [1]


class AnsweredLate(MemoryFileSystem):  # type: ignore[misc]
    """Creates what it is asked for, and then says that it could not."""

    protocol = "late"
    cachable = False

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **options: object
    ) -> None:
        existed = self.exists(path)
        super().pipe_file(path, value, mode=mode, **options)
        if mode == "create" and not existed:
            raise TimeoutError("no answer")


def test_writer_whose_request_got_no_answer_finds_its_own_entry(tmp_path: Path) -> None:
    place = AnsweredLate(), f"/{tmp_path.name}"
    lease = claimed(place, "a")
    lease.append(commit(1))
    assert entry_numbers(*place) == [1, 2]
    assert lease.tail.number == 2


class Overwriting(MemoryFileSystem):  # type: ignore[misc]
    """Takes no notice of conditions, as some S3 servers do."""

    protocol = "overwriting"
    cachable = False

    def pipe_file(
        self,
        path: str,
        value: bytes,
        mode: str = "overwrite",  # noqa: ARG002 - that is the fault
        **options: object,
    ) -> None:
        super().pipe_file(path, value, mode="overwrite", **options)


def test_store_that_overwrites_is_found_out_and_fences_all_the_same(tmp_path: Path) -> None:
    place = Overwriting(), f"/{tmp_path.name}"
    older = claimed(place, "older")
    assert not older.enforced
    claimed(place, "newer")
    with pytest.raises(SupersededError):
        older.append(commit(1))
