"""What the store is given, and what it tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch


class Stateful(Protocol):
    """A part of a run, with tensors only."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The state at the last step boundary."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of a checkpoint."""
        ...


Parts: TypeAlias = Mapping[str, Stateful]


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says of its run and its writer."""

    run_id: str
    fingerprint: str
    attempt_id: str
    experiment: Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that this attempt committed.

    Attributes:
        save_ms: from the start of the save until the marker was durable.
        blocked_ms: how long training stood still for it.
    """

    step: int
    uri: str
    save_ms: float
    blocked_ms: float
    size_bytes: int


@dataclass(frozen=True)
class TakenOver:
    """What a claim of the run has found.

    Attributes:
        conditional_writes: whether the store refuses to create what exists.
        free_bytes: how much still fits into it, where it says so.
    """

    generation: int
    conditional_writes: Literal["enforced", "not_enforced"]
    free_bytes: int | None


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that was not restored, and why."""

    uri: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, if there is one, and the newer ones that are not."""

    uri: str | None
    step: int | None
    versions: Mapping[str, str]
    skipped: tuple[PassedOver, ...]
