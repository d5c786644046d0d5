"""Which rank hosts which virtual rank, and in which round: pure, and agreed without talking."""

from dataclasses import dataclass
from typing import Literal

from kettle.errors import UsageError


@dataclass(frozen=True)
class Round:
    """Virtual ranks that work side by side: one entry a rank, None where a rank has none left."""

    virtual_ranks: tuple[int | None, ...]


@dataclass(frozen=True)
class Hosting:
    """How the virtual ranks of a step are laid out over the ranks, for a whole attempt.

    Attributes:
        rounds: in order of time.
        exchange: "round": leaves travel in every round, which deals virtual rank v to rank
            v mod W. "step": each rank hosts a contiguous block, sums it as a subtree and
            exchanges once.
    """

    rounds: tuple[Round, ...]
    exchange: Literal["round", "step"]

    def hosted_by(self, rank: int) -> tuple[int, ...]:
        """The virtual ranks of one rank, in the order in which they work."""
        hosted = (round_.virtual_ranks[rank] for round_ in self.rounds)
        return tuple(v for v in hosted if v is not None)


def blocks_are_subtrees(*, virtual_ranks: int, world_size: int) -> bool:
    """Whether contiguous blocks of leaves are whole subtrees of the canonical sum's tree.

    Only where V / W is a power of two: with V = 6 and W = 2 a block of three leaves is none.
    """
    block, rest = divmod(virtual_ranks, world_size)
    return rest == 0 and block.bit_count() == 1


def plan_hosting(
    *, virtual_ranks: int, world_size: int, exchange: Literal["auto", "round", "step"]
) -> Hosting:
    """Lay V virtual ranks out over W ranks in ceil(V / W) rounds.

    Args:
        exchange: as `runtime.exchange`; "auto" exchanges once a step wherever that gives the same
            sum.

    Raises:
        UsageError: W is not in 1..V, or "step" would change the sum.
    """
    if not 1 <= world_size <= virtual_ranks:
        raise UsageError(
            f"{world_size} workers can't host experiment.virtual_ranks = {virtual_ranks}; "
            f"use 1 to {virtual_ranks} workers"
        )
    subtrees = blocks_are_subtrees(virtual_ranks=virtual_ranks, world_size=world_size)
    if exchange == "step" and not subtrees:
        raise UsageError(
            'runtime.exchange = "step" needs virtual_ranks / workers to be a power of two, '
            f'but it is {virtual_ranks} / {world_size}; use "auto" or "round"'
        )
    if exchange == "round" or not subtrees:
        return Hosting(rounds=_dealt(virtual_ranks, world_size), exchange="round")
    return Hosting(rounds=_blocks(virtual_ranks, world_size), exchange="step")


def _dealt(virtual_ranks: int, world_size: int) -> tuple[Round, ...]:
    """Virtual rank v at rank v mod W; the last round may leave ranks idle."""
    hosts = range(world_size)
    return tuple(
        Round(tuple(first + rank if first + rank < virtual_ranks else None for rank in hosts))
        for first in range(0, virtual_ranks, world_size)
    )


def _blocks(virtual_ranks: int, world_size: int) -> tuple[Round, ...]:
    """Each rank its own contiguous block."""
    block = virtual_ranks // world_size
    return tuple(
        Round(tuple(rank * block + index for rank in range(world_size))) for index in range(block)
    )
