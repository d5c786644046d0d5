import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.errors import EvidenceError
from kettle.evidence.checks import Difference, Verdict, first_difference, spans, verify
from kettle.evidence.timeline import attempts_of
from kettle.records import Record, Step
from support.logs import (
    committed,
    completed,
    failed,
    flat,
    interrupted_run,
    not_saved,
    preempted,
    started,
    step,
)

TOTAL = 12
LAST_STEPS = st.sets(st.integers(1, TOTAL - 1), max_size=6)


def judged(records: Iterable[Record]) -> Verdict:
    return verify(attempts_of(records))


def test_an_uninterrupted_run_is_whole() -> None:
    verdict = judged(flat(interrupted_run(TOTAL)))
    assert verdict.sentence == "every step 1..12 executed once in 1 attempt, without a resume"
    assert verdict.verdict


@given(LAST_STEPS)
def test_a_run_evicted_anywhere_is_whole(stops: set[int]) -> None:
    verdict = judged(flat(interrupted_run(*sorted(stops), TOTAL)))
    assert verdict.verdict
    assert verdict.faults == ()
    assert verdict.resumed_from == tuple(sorted(stops))
    assert [eviction.step for eviction in verdict.evictions] == sorted(stops)


def test_the_sentence_counts_attempts_and_resumes() -> None:
    verdict = judged(flat(interrupted_run(2, 4, 6, 8, 10, 12)))
    assert verdict.sentence == "every step 1..12 executed once across 6 attempts, with 5 resumes"


@pytest.mark.parametrize("order", tuple(itertools.permutations(range(4))))
def test_the_order_of_log_files_does_not_matter(order: tuple[int, ...]) -> None:
    logs = interrupted_run(3, 5, 9, TOTAL)
    assert judged(flat(logs[n] for n in order)) == judged(flat(logs))


@given(LAST_STEPS, st.sets(st.integers(1, TOTAL), min_size=1))
def test_any_dropped_step_is_named(stops: set[int], dropped: set[int]) -> None:
    records = flat(interrupted_run(*sorted(stops), TOTAL))
    verdict = judged(r for r in records if not (isinstance(r, Step) and r.step in dropped))
    assert not verdict.verdict
    assert verdict.missing_steps == tuple(sorted(dropped))
    assert f"{spans(dropped)} {'is' if len(dropped) == 1 else 'are'} missing" in verdict.sentence


@given(LAST_STEPS, st.sets(st.integers(1, TOTAL), min_size=1))
def test_any_doubled_step_is_named(stops: set[int], doubled: set[int]) -> None:
    records = flat(interrupted_run(*sorted(stops), TOTAL))
    again = [r for r in records if isinstance(r, Step) and r.step in doubled]
    verdict = judged([*records, *again])
    assert not verdict.verdict
    assert verdict.replayed_steps == tuple(sorted(doubled))
    assert f"{spans(doubled)} executed more than once" in verdict.sentence


def test_step_records_are_counted_in_total_and_distinct() -> None:
    records = flat(interrupted_run(4, TOTAL))
    verdict = judged([*records, step("attempt-2", 7), step("attempt-2", 8)])
    assert (verdict.step_records, verdict.distinct_steps) == (14, 12)


def test_steps_after_the_last_checkpoint_of_a_killed_attempt_are_lost() -> None:
    killed = [started("a"), *(step("a", n) for n in range(1, 6)), committed("a", 3)]
    rest = [started("b", resumed_from=3), *(step("b", n) for n in range(4, 13))]
    verdict = judged([*killed, *rest, committed("b", 12), completed("b", 12)])
    assert verdict.lost_steps == (4, 5)
    assert verdict.replayed_steps == (4, 5)
    assert not verdict.verdict


def test_steps_of_an_eviction_that_could_not_save_are_lost_and_the_alarm_is_told() -> None:
    first = [started("a"), *(step("a", n) for n in range(1, 6)), committed("a", 3)]
    verdict = judged([*first, *not_saved("a", 5, saved=3)])
    assert verdict.lost_steps == (4, 5)
    assert verdict.alarms == ("after step 5: disk full",)
    assert [(e.outcome, e.exit_code) for e in verdict.evictions] == [("not_saved", 74)]


def test_a_resume_that_skips_a_step_is_named() -> None:
    first = [started("a"), *(step("a", n) for n in range(1, 5)), preempted("a", 4)]
    rest = [started("b", resumed_from=4), *(step("b", n) for n in range(6, 13))]
    verdict = judged([*first, *rest, completed("b", 12)])
    assert "attempt 2 began with step 6 instead of 5" in verdict.faults


def test_a_resume_from_a_step_that_nobody_saved_is_named() -> None:
    first = [started("a"), *(step("a", n) for n in range(1, 5))]
    rest = [started("b", resumed_from=4), *(step("b", n) for n in range(5, 13))]
    verdict = judged([*first, *rest, completed("b", 12)])
    assert verdict.faults == ("attempt 2 resumed from step 4, which no earlier attempt saved",)


def test_a_resume_from_a_scheduled_checkpoint_counts_as_saved() -> None:
    first = [started("a"), *(step("a", n) for n in range(1, 5)), committed("a", 4)]
    rest = [started("b", resumed_from=4), *(step("b", n) for n in range(5, 13))]
    assert judged([*first, *rest, completed("b", 12)]).verdict


def test_fingerprints_that_differ_between_attempts_are_named() -> None:
    logs = interrupted_run(4, TOTAL)
    logs[1][0] = started("attempt-2", resumed_from=4, at_s=200.0, fingerprint="e" * 64)
    verdict = judged(flat(logs))
    assert verdict.faults == (
        "fingerprints differ (attempt 1: ffffffffffff, attempt 2: eeeeeeeeeeee)",
    )


def test_a_run_that_has_not_finished_is_not_whole() -> None:
    verdict = judged(flat(interrupted_run(4, 9, TOTAL)[:2]))
    assert verdict.sentence == (
        "steps 10-12 are missing; the run is not complete: it reached step 9 of 12"
    )
    assert not verdict.completed


def test_a_run_that_says_it_is_complete_too_early_is_not() -> None:
    verdict = judged([started("a"), *(step("a", n) for n in range(1, 9)), completed("a", 8)])
    assert not verdict.completed


def test_an_attempt_that_completes_and_fails_is_not_complete() -> None:
    verdict = judged([*flat(interrupted_run(TOTAL)), failed("attempt-1", rank=1)])
    assert verdict.faults == (
        "the run is not complete: it reached step 12 of 12 (InjectedFailure: on purpose)",
    )


def test_a_crash_without_replay_does_not_spoil_the_run() -> None:
    first = [started("a"), *(step("a", n) for n in range(1, 5)), committed("a", 4)]
    rest = [started("b", resumed_from=4), *(step("b", n) for n in range(5, 13))]
    assert judged([*first, failed("a"), *rest, completed("b", 12)]).verdict


def test_a_step_outside_the_run_is_named() -> None:
    verdict = judged([*flat(interrupted_run(TOTAL)), step("attempt-1", 13)])
    assert verdict.faults == ("step 13 is outside 1..12",)


def test_a_run_of_which_nothing_started_is_not_whole() -> None:
    verdict = judged([preempted("a", None)])
    assert not verdict.verdict
    assert verdict.total_steps is None
    assert "no attempt says that it started" in verdict.sentence


def test_an_eviction_before_the_first_step_leaves_the_run_whole() -> None:
    verdict = judged([*flat(interrupted_run(4, TOTAL)), preempted("early", None, at_s=150.0)])
    assert verdict.sentence == "every step 1..12 executed once across 3 attempts, with 1 resume"
    assert verdict.preemptions == 2


def test_an_eviction_row_says_what_the_preemption_record_says() -> None:
    (row,) = judged(flat(interrupted_run(4, TOTAL))).evictions
    assert row.model_dump() == {
        "attempt": 1,
        "attempt_id": "attempt-1",
        "step": 4,
        "save_ms": 42.0,
        "grace_left_s": 29.5,
        "exit_code": 75,
        "outcome": "saved",
    }


def test_a_verdict_survives_json() -> None:
    verdict = judged(flat(interrupted_run(4, TOTAL)))
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_no_attempts_are_refused() -> None:
    with pytest.raises(EvidenceError, match="no attempt to judge"):
        verify(())


def test_spans_join_neighbours() -> None:
    assert spans([9, 3, 7, 8]) == "3, 7-9"


@given(st.sets(st.integers(1, 50)))
def test_spans_name_every_step_and_no_other(steps: set[int]) -> None:
    named: set[int] = set()
    for part in filter(None, spans(steps).split(", ")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == steps


def test_equal_runs_have_no_difference() -> None:
    assert first_difference(flat(interrupted_run(12)), flat(interrupted_run(4, 9, 12))) is None


@pytest.mark.parametrize("field", ["loss", "lr", "grad_norm"])
def test_the_first_differing_step_is_named(field: str) -> None:
    trial = [step("a", n) for n in range(1, 13)]
    trial[6] = trial[6].model_copy(update={field: 0.25})
    trial[9] = trial[9].model_copy(update={field: 0.25})
    found = first_difference(flat(interrupted_run(12)), trial)
    assert found is not None
    assert (found.step, found.field, found.trial) == (7, field, 0.25)


def test_other_samples_are_named_before_what_follows_from_them() -> None:
    trial = step("a", 3, sample_digest="0" * 16, loss=1.5, grad_norm=2.0, lr=0.5)
    assert first_difference([step("a", 3)], [trial]) == Difference(
        step=3, field="sample_digest", reference=f"{3:016x}", trial="0" * 16
    )


def test_another_learning_rate_is_named_before_the_loss() -> None:
    found = first_difference([step("a", 3)], [step("a", 3, lr=0.5, loss=1.5)])
    assert found is not None
    assert found.field == "lr"


def test_of_a_replayed_step_the_last_execution_counts() -> None:
    reference = [step("a", 1), step("a", 2)]
    trial = [
        started("b", resumed_from=1, at_s=9.0),
        step("b", 2),
        started("a", at_s=1.0),
        step("a", 1),
        step("a", 2, loss=7.0),
    ]
    assert first_difference(reference, trial) is None


def test_nan_equals_nan_in_step_records() -> None:
    nan = float("nan")
    assert first_difference([step("a", 1, loss=nan)], [step("a", 1, loss=nan)]) is None


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(EvidenceError, match="no step in common"):
        first_difference([step("a", 1)], [step("a", 2)])


def test_logs_of_several_runs_of_one_experiment_are_told_apart() -> None:
    twice = [*flat(interrupted_run(4, 12)), *renamed(flat(interrupted_run(12)))]
    verdict = verify(attempts_of(twice))
    assert not verdict.verdict
    assert "may be logs of several runs" in verdict.sentence


def renamed(records: list[Record]) -> list[Record]:
    return [r.model_copy(update={"attempt_id": f"other-{r.attempt_id}"}) for r in records]
