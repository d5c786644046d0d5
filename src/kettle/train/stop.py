"""From a signal to a decision that all ranks share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kettle import signals
from kettle.distributed import Ranks, earliest


class StopSource(Protocol):
    """Whether this rank has been asked to stop."""

    def __call__(self, *, step: int, micro_batch: int) -> float | None:
        """When the request came, in monotonic seconds; None if there is none.

        It is asked before each micro-batch and told which one.
        """
        ...


@dataclass(frozen=True)
class StopDecision:
    """All ranks agreed to stop.

    Attributes:
        requested_s: the earliest request of any rank, in monotonic seconds.
        micro_batch: how many micro-batches of the step under way are dropped.
    """

    requested_s: float
    micro_batch: int


def signal_source(stop_file: str | None) -> StopSource:
    """Stop on SIGTERM or SIGINT; the time is the launcher's where it left word."""

    def requested(*, step: int, micro_batch: int) -> float | None:  # noqa: ARG001 - the interface's
        noted = signals.stop_noted_at()
        if noted is None or stop_file is None:
            return noted
        # While a rank is inside a kernel its own handler waits; the launcher's did not.
        told = signals.read_stop_file(stop_file)
        return noted if told is None else min(noted, told)

    return requested


def agree(
    source: Callable[..., float | None], *, step: int, micro_batch: int, ranks: Ranks
) -> StopDecision | None:
    """Decide with all ranks whether to stop before this micro-batch; collective."""
    requested = earliest(source(step=step, micro_batch=micro_batch), ranks=ranks)
    if requested is None:
        return None
    return StopDecision(requested_s=requested, micro_batch=micro_batch)
