"""Two logs of one experiment: the first step that differs, and what that says of the cause."""

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kettle.evidence.checks import Difference, first_difference
from kettle.evidence.timeline import attempts_of
from kettle.records import Record, Step

Kind = Literal["data", "schedule", "rng", "state", "gradients", "optimizer", "reporting"]

_KINDS: dict[str, Kind] = {
    "sample_digest": "data",
    "lr": "schedule",
    "rng_digest": "rng",
    "loss": "state",
    "grad_norm": "gradients",
    "weights_digest": "optimizer",
}

_WORDS: dict[Kind, str] = {
    "data": "other samples were consumed, or in another order: suspect the loader's position",
    "schedule": "the learning rate differs first: suspect the schedule's state",
    "rng": "the random streams stand elsewhere: suspect their restore, or something that draws",
    "state": "the same samples, learning rate and random streams gave another loss: suspect the "
    "weights, or what a sample holds",
    "gradients": "the loss is the same and the gradients are not: suspect the reduction, or the "
    "backward pass",
    "optimizer": "the same gradients led to other weights: suspect the optimizer's state",
    "reporting": "the weights are the same afterwards: only what was reported differs",
}


class Diff(BaseModel):
    """What two logs have in common, and where they part. Printed by `kettle diff --json`."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    same: bool
    difference: Difference | None = Field(description="At the first step that differs.")
    kind: Kind | None = Field(description="What differs first.")
    sentence: str
    common_steps: int = Field(description="Steps that both have.")
    weights_compared_at: tuple[int, ...] = Field(
        description="Steps for which both have a digest of the weights."
    )


def diff(reference: Iterable[Record], trial: Iterable[Record]) -> Diff:
    """Find the first step whose records differ, and name what differs first.

    Where a run executed a step more than once, its last execution counts, as it does for the
    weights.

    Raises:
        EvidenceError: the two have no step in common.
    """
    reference, trial = list(reference), list(trial)
    difference = first_difference(reference, trial)
    ours, theirs = _steps(reference), _steps(trial)
    common = sorted(ours.keys() & theirs.keys())
    compared = tuple(s for s in common if ours[s].weights_digest and theirs[s].weights_digest)
    kind = None
    sentence = f"no common step differs; {len(common)} were compared"
    if difference is not None:
        kind = _KINDS[difference.field]
        later = [s for s in compared if s >= difference.step]
        if kind in ("state", "gradients") and any(
            ours[s].weights_digest == theirs[s].weights_digest for s in later
        ):
            kind = "reporting"
        sentence = _WORDS[kind]
    return Diff(
        same=difference is None,
        difference=difference,
        kind=kind,
        sentence=sentence,
        common_steps=len(common),
        weights_compared_at=compared,
    )


def _steps(records: list[Record]) -> dict[int, Step]:
    return {step.step: step for attempt in attempts_of(records) for step in attempt.steps}
