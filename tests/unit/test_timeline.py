import random

from hypothesis import given
from hypothesis import strategies as st

from kettle.evidence.timeline import attempts_of
from support.logs import (
    committed,
    completed,
    failed,
    flat,
    interrupted_run,
    preempted,
    started,
    step,
)


def test_attempts_come_in_the_order_of_what_they_resumed_from() -> None:
    logs = interrupted_run(3, 7, 9, 12)
    attempts = attempts_of(flat(reversed(logs)))
    assert [a.resumed_from for a in attempts] == [None, 3, 7, 9]


def test_clocks_that_disagree_do_not_change_the_order_of_resumes() -> None:
    late = [started("first", at_s=900.0), step("first", 1), preempted("first", 1)]
    early = [started("second", resumed_from=1, at_s=100.0), step("second", 2)]
    assert [a.attempt_id for a in attempts_of([*early, *late])] == ["first", "second"]


def test_attempts_from_the_same_step_are_ordered_by_the_clock() -> None:
    records = [
        started("second", resumed_from=3, at_s=2.0),
        started("first", resumed_from=3, at_s=1.0),
    ]
    assert [a.attempt_id for a in attempts_of(records)] == ["first", "second"]


def test_attempts_that_nothing_tells_apart_stay_in_log_order() -> None:
    records = [started("b"), started("a"), started("c")]
    assert [a.attempt_id for a in attempts_of(records)] == ["b", "a", "c"]


@given(st.integers())
def test_records_of_one_attempt_belong_together_however_logs_are_interleaved(seed: int) -> None:
    logs = interrupted_run(4, 9, 12)
    orders = [number for number, log in enumerate(logs) for _ in log]
    random.Random(seed).shuffle(orders)
    queues = [iter(log) for log in logs]
    mixed = [next(queues[number]) for number in orders]
    assert attempts_of(mixed) == attempts_of(flat(logs))


def test_an_attempt_that_ended_before_it_started_is_an_attempt() -> None:
    logs = interrupted_run(4, 12)
    never_started = preempted("too-early", None, at_s=150.0)
    attempts = attempts_of([never_started, *flat(logs)])
    assert [a.attempt_id for a in attempts] == ["attempt-1", "too-early", "attempt-2"]
    assert attempts[1].started is None
    assert attempts[1].preemption == never_started


def test_a_container_that_restarts_under_its_pods_name_is_another_attempt() -> None:
    records = [
        started("pod"),
        step("pod", 1),
        preempted("pod", 1),
        started("pod", resumed_from=1, at_s=1.0),
        step("pod", 2),
    ]
    assert [[s.step for s in a.steps] for a in attempts_of(records)] == [[1], [2]]


def test_the_first_failure_of_an_attempt_is_kept() -> None:
    (attempt,) = attempts_of([started("a"), failed("a", rank=1), failed("a", rank=None)])
    assert attempt.failed is not None
    assert attempt.failed.rank == 1


def test_saved_steps_are_those_of_checkpoints_and_of_the_eviction() -> None:
    (attempt,) = attempts_of([started("a"), committed("a", 2), preempted("a", 5)])
    assert attempt.saved_steps == {2, 5}


def test_an_eviction_with_nothing_new_has_saved_nothing() -> None:
    (attempt,) = attempts_of([started("a"), preempted("a", None)])
    assert attempt.saved_steps == frozenset()


def test_a_completed_attempt_says_so() -> None:
    (attempt,) = attempts_of([started("a"), completed("a", 12)])
    assert attempt.completed == completed("a", 12)
