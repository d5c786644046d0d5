"""Which rank hosts which virtual rank, and in which round: pure, and agreed without talking."""

from dataclasses import dataclass
from typing import Literal


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
    *, virtual_ranks: int, world_size: int, exchange: Literal["round", "step"]
) -> Hosting:
    """Lay V virtual ranks out over W ranks in ceil(V / W) rounds.

    Raises:
        ValueError: W is not in 1..V, or exchange = "step" where it would change the sum.
    """
    if not 1 <= world_size <= virtual_ranks:
        raise ValueError(f"{world_size} ranks can't host {virtual_ranks} virtual ranks")
    if exchange == "step":
        if not blocks_are_subtrees(virtual_ranks=virtual_ranks, world_size=world_size):
            raise ValueError(
                f"{virtual_ranks} virtual ranks over {world_size} ranks are not whole subtrees"
            )
        block = virtual_ranks // world_size
        rounds = tuple(
            Round(tuple(rank * block + r for rank in range(world_size))) for r in range(block)
        )
        return Hosting(rounds=rounds, exchange="step")
    rounds = tuple(
        Round(
            tuple(
                first + rank if first + rank < virtual_ranks else None for rank in range(world_size)
            )
        )
        for first in range(0, virtual_ranks, world_size)
    )
    return Hosting(rounds=rounds, exchange="round")
