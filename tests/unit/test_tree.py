import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kettle.reduction.tree import LeafCounter, fold_columns


def leaves(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) * 10.0 ** (i % 7) for i in range(count)]


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    counter = LeafCounter()
    for part in parts:
        counter.push(part.clone())
    return counter.total()


def test_five_leaves_are_summed_as_a_pairwise_tree() -> None:
    a, b, c, d, e = leaves(5)
    assert total_of([a, b, c, d, e]).equal(((a + b) + (c + d)) + e)


def test_seven_leaves_fold_the_rest_from_the_newest() -> None:
    a, b, c, d, e, f, g = leaves(7)
    assert total_of([a, b, c, d, e, f, g]).equal(((a + b) + (c + d)) + ((e + f) + g))


def test_counter_is_empty_after_a_total() -> None:
    counter = LeafCounter()
    for _ in range(2):
        for leaf in leaves(3):
            counter.push(leaf)
        assert counter.total().equal(total_of(leaves(3)))


def test_dropped_leaves_leave_no_trace() -> None:
    counter = LeafCounter()
    counter.push(torch.full((7,), float("nan")))
    counter.clear()
    counter.push(leaves(1)[0])
    assert counter.total().equal(leaves(1)[0])


def test_compact_partial_sums_own_their_memory() -> None:
    counter, rows = LeafCounter(), torch.arange(8.0).view(2, 4)
    for row in rows:
        counter.push(row)
    counter.compact()
    rows.fill_(9.0)
    assert counter.total().tolist() == [4.0, 6.0, 8.0, 10.0]


@given(blocks=st.integers(1, 16), power=st.integers(0, 3), seed=st.integers(0, 99))
def test_blocks_of_a_power_of_two_may_be_summed_first(blocks: int, power: int, seed: int) -> None:
    """The schedule with one exchange a step: each rank a block, then the blocks in order."""
    size = 2**power
    parts = leaves(blocks * size, seed)
    roots = [total_of(parts[i : i + size]) for i in range(0, len(parts), size)]
    assert total_of(roots).equal(total_of(parts))


def test_blocks_of_three_may_not() -> None:
    differs = []
    for seed in range(20):
        parts = leaves(6, seed)
        roots = [total_of(parts[:3]), total_of(parts[3:])]
        differs.append(not total_of(roots).equal(total_of(parts)))
    assert any(differs)


@given(rows=st.integers(1, 9), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_sum_of_a_row_does_not_depend_on_the_rows_beside_it(
    rows: int, columns: int, seed: int
) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double()
    together = fold_columns(values.clone())
    apart = torch.cat([fold_columns(row.clone()) for row in values.split(1)])
    assert together.equal(apart)
    torch.testing.assert_close(together, values.sum(1))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 31, 33_000])
def test_fold_counts_every_column_once(columns: int) -> None:
    assert fold_columns(torch.ones(2, columns)).tolist() == [columns, columns]
