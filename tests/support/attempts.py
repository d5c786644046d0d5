"""Attempts of a run inside the test process, stopped and changed where the test says."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from kettle.config import RunConfig
from kettle.data.loader import Dataset
from kettle.distributed import Ranks, process_group
from kettle.evidence.compare import Comparison, compare
from kettle.exits import ExitCode
from kettle.records import CheckpointCommitted, Record, RunStarted, Step
from kettle.state.parts import Part
from kettle.train.assemble import assemble
from kettle.train.run import Run
from kettle.train.stop import StopSource
from kettle.train.worker import train_or_note

R = TypeVar("R")
Change = Callable[[Run], Run]


@dataclass(frozen=True)
class StopAt:
    """Asks for a stop before one micro-batch of one step."""

    step: int
    micro_batch: int = 0

    def __call__(self, *, step: int, micro_batch: int) -> float | None:
        return time.monotonic() if (step, micro_batch) == (self.step, self.micro_batch) else None


def never(*, step: int, micro_batch: int) -> float | None:  # noqa: ARG001
    return None


@dataclass(frozen=True)
class Told:
    """What attempts said, and how the last one ended."""

    records: tuple[Record, ...]
    exit_code: ExitCode

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def steps(self) -> list[Step]:
        return self.of(Step)

    @property
    def resumed_from(self) -> int | None:
        return self.of(RunStarted)[-1].resumed_from

    @property
    def last_checkpoint(self) -> str:
        return self.of(CheckpointCommitted)[-1].checkpoint_uri


def as_it_is(run: Run) -> Run:
    return run


def attempt(
    config: RunConfig,
    dataset: Dataset,
    *,
    ranks: Ranks,
    name: str = "attempt",
    stop: StopSource = never,
    change: Change = as_it_is,
    begin: Literal["newest", "scratch"] = "newest",
) -> Told:
    """One attempt on this rank; every rank gets the records."""
    records: list[Record] = []
    run = assemble(
        config,
        dataset,
        ranks=ranks,
        attempt_id=name,
        stop=stop,
        emit=records.append,
        grace_s=30.0,
        begin=begin,
    )
    run = change(run)
    outcome = train_or_note(run)
    run.batches.close()
    return Told(records=tuple(records), exit_code=outcome.exit_code)


def alone(config: RunConfig, dataset: Dataset, **options: Any) -> Told:
    """One attempt with this process as the only rank."""
    with process_group("cpu", timeout_s=60) as ranks:
        return attempt(config, dataset, ranks=ranks, **options)


def interrupted(
    config: RunConfig,
    dataset: Dataset,
    *,
    stops: Iterable[StopSource],
    change: Change = as_it_is,
) -> list[Told]:
    """Attempts stopped one after the other, then one that is not; all but the first are changed."""
    told = []
    for number, stop in enumerate([*stops, never], start=1):
        changed = as_it_is if number == 1 else change
        told.append(alone(config, dataset, name=f"attempt{number}", stop=stop, change=changed))
    return told


def compared(reference: Told, trial: Told) -> Comparison:
    """The last checkpoints of two runs, tensor by tensor."""
    return compare(reference.last_checkpoint, trial.last_checkpoint)


@dataclass
class Forgetful:
    """A part that is saved but not restored: not at all, or not under some keys."""

    part: Part
    keys: frozenset[str] | None = None
    _own: dict[str, torch.Tensor] = field(default_factory=dict)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        # A copy: torch's loader writes into these tensors, and the originals are the live weights.
        self._own = copy.deepcopy(dict(self.part.state_dict()))
        return copy.deepcopy(self._own)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.keys is not None:
            kept = {k: self._own[k] if k in self.keys else v for k, v in state.items()}
            self.part.load_state_dict(kept)


def forgetting(*names: str, keys: Iterable[str] | None = None) -> Change:
    """Wrap parts of a run so that they are not restored."""

    def change(run: Run) -> Run:
        chosen = None if keys is None else frozenset(keys)
        parts = {
            name: Forgetful(part, chosen) if name in names else part
            for name, part in run.parts.items()
        }
        return dataclasses.replace(run, parts=parts)

    return change
