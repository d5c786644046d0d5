"""Verdicts on a run's attempts. Pure, and without torch, so a laptop can judge a run."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kettle.errors import EvidenceError
from kettle.evidence.timeline import Attempt, attempts_of
from kettle.records import Record, Step


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Eviction(_Finding):
    """One attempt that ended because it was told to."""

    attempt: int = Field(description="Which attempt of the run, counted from 1.")
    attempt_id: str
    step: int | None = Field(description="Last finished step; None: training had not begun.")
    save_ms: float | None
    grace_left_s: float | None
    exit_code: int
    outcome: Literal["saved", "already_saved", "nothing_new", "not_saved"]


class Verdict(_Finding):
    """What the records of a run prove. Printed by `kettle verify --json`."""

    run_id: str
    verdict: bool = Field(description="True: every step once, every resume exact, run complete.")
    sentence: str = Field(description="The verdict in words.")
    faults: tuple[str, ...] = Field(description="Why the verdict is false; empty if it is true.")
    completed: bool
    total_steps: int | None = Field(description="None: no attempt has started.")
    attempts: int
    step_records: int
    distinct_steps: int
    resumed_from: tuple[int, ...] = Field(description="In the order of the attempts.")
    replayed_steps: tuple[int, ...] = Field(description="Steps with more than one record.")
    missing_steps: tuple[int, ...] = Field(description="Steps of 1..total_steps without a record.")
    lost_steps: tuple[int, ...] = Field(
        description="Steps that an attempt finished after its last checkpoint."
    )
    alarms: tuple[str, ...] = Field(description="What a person should look at, in the order said.")
    preemptions: int
    evictions: tuple[Eviction, ...]
    weights_digest: str | None = Field(description="Of the completed run.")


ComparedField: TypeAlias = Literal[
    "sample_digest", "lr", "rng_digest", "loss", "grad_norm", "weights_digest"
]
"""Fields of a step record that two runs of one experiment share."""


class Difference(_Finding):
    """The first thing in which two runs' step records differ."""

    step: int
    field: ComparedField
    reference: str | float
    trial: str | float


# What a step starts from comes before what it computes, so the first entry that differs is a cause.
_COMPARED: tuple[ComparedField, ...] = (
    "sample_digest",
    "lr",
    "rng_digest",
    "loss",
    "grad_norm",
    "weights_digest",
)


def verify(attempts: Sequence[Attempt]) -> Verdict:
    """Judge a run by its attempts, given in order. Raises EvidenceError if there are none."""
    if not attempts:
        raise EvidenceError("there is no attempt to judge; name the logs of a run")
    executed = Counter(step.step for attempt in attempts for step in attempt.steps)
    total = next((a.started.total_steps for a in attempts if a.started), None)
    missing = tuple(step for step in range(1, (total or 0) + 1) if step not in executed)
    replayed = tuple(sorted(step for step, times in executed.items() if times > 1))
    resumed = tuple(a.resumed_from for a in attempts if a.resumed_from is not None)
    finish = next((a for a in reversed(attempts) if _is_complete(a)), None)
    evictions = tuple(_evictions(attempts))
    faults = tuple(
        itertools.chain(
            _unstarted(attempts),
            _uneven(executed, missing=missing, replayed=replayed, total=total),
            _several_runs(attempts),
            _inexact_resumes(attempts),
            _differing_fingerprints(attempts),
            [] if finish else _unfinished(attempts, total=total),
        )
    )
    return Verdict(
        run_id=attempts[0].run_id,
        verdict=not faults,
        sentence="; ".join(faults) or _praise(total, attempts=len(attempts), resumes=len(resumed)),
        faults=faults,
        completed=finish is not None,
        total_steps=total,
        attempts=len(attempts),
        step_records=executed.total(),
        distinct_steps=len(executed),
        resumed_from=resumed,
        replayed_steps=replayed,
        missing_steps=missing,
        lost_steps=tuple(sorted({step for attempt in attempts for step in _lost(attempt)})),
        alarms=tuple(
            f"after step {alarm.step}: {alarm.message}"
            for attempt in attempts
            for alarm in attempt.alarms
        ),
        preemptions=len(evictions),
        evictions=evictions,
        weights_digest=finish.completed.weights_digest if finish and finish.completed else None,
    )


def first_difference(reference: Iterable[Record], trial: Iterable[Record]) -> Difference | None:
    """The first step of both runs whose records differ in what was consumed or computed.

    Where a run executed a step more than once, its last execution counts, as it does for the
    weights. Steps that only one run has are the business of `verify`.

    Raises:
        EvidenceError: the two runs have no step in common, so nothing can be compared.
    """
    expected, found = _last_executions(reference), _last_executions(trial)
    common = sorted(expected.keys() & found.keys())
    if not common:
        raise EvidenceError("the records have no step in common; name logs that cover one stretch")
    for step in common:
        for field in _COMPARED:
            ours, theirs = getattr(expected[step], field), getattr(found[step], field)
            if ours is None or theirs is None:
                continue  # a log of before there were such digests, or of another cadence
            # Two NaNs are unequal to Python and the same to us.
            if ours != theirs and repr(ours) != repr(theirs):
                return Difference(step=step, field=field, reference=ours, trial=theirs)
    return None


def spans(steps: Iterable[int]) -> str:
    """Steps in few words: `3, 7-9`."""
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(sorted(steps))
    )


def _runs(steps: Sequence[int]) -> Iterator[list[int]]:
    for _, group in itertools.groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0]):
        yield [step for _, step in group]


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {spans(steps)}"


def _is_are(steps: Sequence[int]) -> str:
    return f"{_named(steps)} {'is' if len(steps) == 1 else 'are'}"


def _praise(total: int | None, *, attempts: int, resumes: int) -> str:
    across = f"across {attempts} attempts" if attempts > 1 else "in 1 attempt"
    with_ = {0: "without a resume", 1: "with 1 resume"}.get(resumes, f"with {resumes} resumes")
    return f"every step 1..{total} executed once {across}, {with_}"


def _unstarted(attempts: Sequence[Attempt]) -> Iterator[str]:
    if not any(attempt.started for attempt in attempts):
        yield "no attempt says that it started (run_started)"


def _uneven(
    executed: Counter[int], *, missing: Sequence[int], replayed: Sequence[int], total: int | None
) -> Iterator[str]:
    if missing:
        yield f"{_is_are(missing)} missing"
    if replayed:
        yield f"{_named(replayed)} executed more than once"
    foreign = sorted(step for step in executed if total is not None and not 1 <= step <= total)
    if foreign:
        yield f"{_is_are(foreign)} outside 1..{total}"


def _several_runs(attempts: Sequence[Attempt]) -> Iterator[str]:
    ends = [number for number, a in enumerate(attempts, start=1) if a.completed and a.steps]
    if len(ends) > 1:
        yield (
            f"attempts {spans(ends)} each took the last step, so these may be logs of several "
            "runs (name the folder of one)"
        )


def _inexact_resumes(attempts: Sequence[Attempt]) -> Iterator[str]:
    saved: set[int] = set()
    for number, attempt in enumerate(attempts, start=1):
        origin = attempt.resumed_from
        if origin is not None and origin not in saved:
            yield f"attempt {number} resumed from step {origin}, which no earlier attempt saved"
        if attempt.started and attempt.steps:
            expected, first = (origin or 0) + 1, attempt.steps[0].step
            if first != expected:
                yield f"attempt {number} began with step {first} instead of {expected}"
        saved |= attempt.saved_steps


def _differing_fingerprints(attempts: Sequence[Attempt]) -> Iterator[str]:
    first: dict[str, int] = {}
    for number, attempt in enumerate(attempts, start=1):
        if attempt.started:
            first.setdefault(attempt.started.fingerprint, number)
    if len(first) > 1:
        listing = ", ".join(f"attempt {number}: {digest[:12]}" for digest, number in first.items())
        yield f"fingerprints differ ({listing})"


def _unfinished(attempts: Sequence[Attempt], *, total: int | None) -> Iterator[str]:
    reached = max((step.step for attempt in attempts for step in attempt.steps), default=0)
    failed = next((a.failed for a in reversed(attempts) if a.failed), None)
    cause = f" ({failed.error}: {failed.message})" if failed else ""
    yield f"the run is not complete: it reached step {reached} of {total or 'unknown'}{cause}"


def _is_complete(attempt: Attempt) -> bool:
    return (
        attempt.completed is not None
        and attempt.started is not None
        and attempt.completed.step == attempt.started.total_steps
        and attempt.failed is None
    )


def _lost(attempt: Attempt) -> Iterator[int]:
    kept = max({attempt.resumed_from or 0, *attempt.saved_steps})
    return (step.step for step in attempt.steps if step.step > kept)


def _evictions(attempts: Sequence[Attempt]) -> Iterator[Eviction]:
    for number, attempt in enumerate(attempts, start=1):
        if attempt.preemption:
            yield Eviction(
                attempt=number,
                attempt_id=attempt.attempt_id,
                step=attempt.preemption.step,
                save_ms=attempt.preemption.save_ms,
                grace_left_s=attempt.preemption.grace_left_s,
                exit_code=attempt.preemption.exit_code,
                outcome=attempt.preemption.outcome,
            )


def _last_executions(records: Iterable[Record]) -> dict[int, Step]:
    return {step.step: step for attempt in attempts_of(records) for step in attempt.steps}
