"""What a chaos run found: the document `chaos.json`, and what of it decides the exit status."""

from pydantic import BaseModel, ConfigDict, Field, computed_field

from kettle.evidence import checks
from kettle.evidence.compare import Comparison, Judgement


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Plan(_Document):
    """What was asked for, resolved."""

    run_file: str
    overrides: tuple[str, ...] = Field(description="The `--set` values, without the roots.")
    total_steps: int
    seed: int | None = Field(description="Of the jitter; None: evenly spaced.")
    points: tuple[int, ...] = Field(description="An attempt is evicted once it reports this step.")
    workers: tuple[int, ...] = Field(description="Workers of each attempt of the trial.")
    reference_workers: int = Field(description="Workers of both references.")


class PlannedEviction(checks.Eviction):
    """An eviction as the records tell it, beside what was planned."""

    planned_step: int
    workers: int


class ChaosResult(_Document):
    """Everything that `kettle chaos` found. Written to `chaos.json`, printed by `--json`."""

    plan: Plan
    evictions: tuple[PlannedEviction, ...]
    trial: checks.Verdict = Field(description="What `kettle verify` says about the trial.")
    references: tuple[checks.Verdict, checks.Verdict]
    first_difference: checks.Difference | None = Field(
        description="First step record in which the trial differs from reference 1."
    )
    comparison: Comparison = Field(description="Final checkpoints of reference 1 and the trial.")
    floor: float = Field(description="Largest difference of the two references.")
    verdict: Judgement = Field(description="Of the comparison, seen against the floor.")
    wall_s: float = Field(description="From the first launch to the comparison.")

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorator on a property
    @property
    def passed(self) -> bool:
        """Whether bits, step records and the count of executed steps all agree."""
        return (
            self.verdict == "bit-identical"
            and self.first_difference is None
            and all(run.verdict for run in (self.trial, *self.references))
        )
