from math import ceil

import pytest

from kettle.errors import UsageError
from kettle.hosting import Hosting, blocks_are_subtrees, plan_hosting

SIZES = [(v, w) for v in range(1, 17) for w in range(1, v + 1)]
Tree = int | tuple["Tree", "Tree"]


def canonical_sum(leaves: list[Tree]) -> Tree:
    """The shape of a binary counter's sum: carry while two partial sums weigh the same."""
    stack: list[tuple[int, Tree]] = []
    for leaf in leaves:
        weight, tree = 1, leaf
        while stack and stack[-1][0] == weight:
            weight, tree = 2 * weight, (stack.pop()[1], tree)
        stack.append((weight, tree))
    total = stack.pop()[1]
    while stack:
        total = (stack.pop()[1], total)
    return total


def all_hosted(plan: Hosting, world_size: int) -> list[int]:
    return sorted(v for rank in range(world_size) for v in plan.hosted_by(rank))


@pytest.mark.parametrize("virtual_ranks", range(1, 17))
def test_every_virtual_rank_is_hosted_exactly_once(virtual_ranks: int) -> None:
    for world_size in range(1, virtual_ranks + 1):
        plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="round")
        assert all_hosted(plan, world_size) == list(range(virtual_ranks))


@pytest.mark.parametrize("virtual_ranks", range(1, 17))
def test_a_step_has_as_few_rounds_as_possible(virtual_ranks: int) -> None:
    for world_size in range(1, virtual_ranks + 1):
        plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="round")
        assert len(plan.rounds) == ceil(virtual_ranks / world_size)
        assert all(len(round_.virtual_ranks) == world_size for round_ in plan.rounds)


@pytest.mark.parametrize("virtual_ranks", range(1, 17))
def test_exchange_by_round_deals_virtual_ranks_in_turn(virtual_ranks: int) -> None:
    for world_size in range(1, virtual_ranks + 1):
        plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="round")
        for rank in range(world_size):
            assert plan.hosted_by(rank) == tuple(range(rank, virtual_ranks, world_size))


@pytest.mark.parametrize("virtual_ranks", range(1, 17))
def test_only_the_last_round_leaves_ranks_idle(virtual_ranks: int) -> None:
    for world_size in range(1, virtual_ranks + 1):
        plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="round")
        *full, _last = plan.rounds
        assert all(None not in round_.virtual_ranks for round_ in full)


@pytest.mark.parametrize(
    ("virtual_ranks", "world_size"), [size for size in SIZES if size[0] % size[1] == 0]
)
def test_blocks_count_as_subtrees_exactly_where_they_sum_to_the_same_tree(
    virtual_ranks: int, world_size: int
) -> None:
    block = virtual_ranks // world_size
    leaves: list[Tree] = list(range(virtual_ranks))
    blocks = [canonical_sum(leaves[r * block : (r + 1) * block]) for r in range(world_size)]
    same = canonical_sum(blocks) == canonical_sum(leaves)
    # One rank alone has the whole tree, whatever its shape; nothing travels, so nothing is won.
    alone = world_size == 1
    assert same == (
        alone or blocks_are_subtrees(virtual_ranks=virtual_ranks, world_size=world_size)
    )


@pytest.mark.parametrize(("virtual_ranks", "world_size"), SIZES)
def test_exchange_by_step_gives_each_rank_one_block_or_is_refused(
    virtual_ranks: int, world_size: int
) -> None:
    block, rest = divmod(virtual_ranks, world_size)
    if rest or block not in (1, 2, 4, 8, 16):
        with pytest.raises(UsageError, match=rf"\b{virtual_ranks} / {world_size}\b.*use"):
            plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="step")
        return
    plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="step")
    assert len(plan.rounds) == block
    for rank in range(world_size):
        assert plan.hosted_by(rank) == tuple(range(rank * block, (rank + 1) * block))


@pytest.mark.parametrize(("virtual_ranks", "world_size"), SIZES)
def test_auto_exchanges_once_a_step_exactly_where_the_sum_stays_the_same(
    virtual_ranks: int, world_size: int
) -> None:
    plan = plan_hosting(virtual_ranks=virtual_ranks, world_size=world_size, exchange="auto")
    lean = blocks_are_subtrees(virtual_ranks=virtual_ranks, world_size=world_size)
    assert plan.exchange == ("step" if lean else "round")
    assert all_hosted(plan, world_size) == list(range(virtual_ranks))


def test_six_virtual_ranks_over_two_ranks_must_exchange_every_round() -> None:
    assert not blocks_are_subtrees(virtual_ranks=6, world_size=2)


@pytest.mark.parametrize("world_size", [0, -1, 5])
def test_number_of_ranks_that_can_not_host_is_refused(world_size: int) -> None:
    with pytest.raises(UsageError, match=f"{world_size} workers .* use 1 to 4 workers"):
        plan_hosting(virtual_ranks=4, world_size=world_size, exchange="round")
