import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kettle.chaos.plan import parse_workers, plan_evictions, width_of
from kettle.errors import UsageError

LENGTHS = st.integers(min_value=2, max_value=10_000)
SEEDS = st.none() | st.integers(min_value=0, max_value=2**64)


@st.composite
def runs_with_room(draw: st.DrawFn) -> tuple[int, int]:
    """Steps of a run, and a number of evictions that fits into it."""
    total_steps = draw(LENGTHS)
    largest = total_steps * 4 // 5
    return total_steps, draw(st.integers(min_value=1, max_value=min(largest, 200)))


@given(LENGTHS, st.integers(min_value=1, max_value=8))
def test_up_to_eight_evictions_are_spaced_by_the_published_formula(
    total_steps: int, evictions: int
) -> None:
    assume(total_steps >= evictions + 2)
    stride = total_steps // (evictions + 2)
    expected = tuple(k * stride for k in range(1, evictions + 1))
    assert plan_evictions(total_steps, evictions) == expected


@given(runs_with_room(), SEEDS)
def test_every_asked_eviction_gets_a_point(run: tuple[int, int], seed: int | None) -> None:
    total_steps, evictions = run
    assert len(plan_evictions(total_steps, evictions, seed)) == evictions


@given(runs_with_room(), SEEDS)
def test_no_point_is_past_80_percent_of_the_run(run: tuple[int, int], seed: int | None) -> None:
    total_steps, evictions = run
    assert max(plan_evictions(total_steps, evictions, seed)) * 5 <= total_steps * 4


@given(runs_with_room(), SEEDS)
def test_there_is_work_behind_every_point(run: tuple[int, int], seed: int | None) -> None:
    total_steps, evictions = run
    assert plan_evictions(total_steps, evictions, seed)[0] >= 1


@given(runs_with_room(), SEEDS)
def test_points_strictly_increase(run: tuple[int, int], seed: int | None) -> None:
    total_steps, evictions = run
    points = plan_evictions(total_steps, evictions, seed)
    assert all(before < after for before, after in itertools.pairwise(points))


@given(st.integers(min_value=9, max_value=200), st.integers(min_value=1, max_value=50))
def test_above_eight_evictions_the_gaps_differ_by_one_step_at_most(
    evictions: int, spare: int
) -> None:
    total_steps = (evictions + spare) * 5 // 4 + 1
    points = plan_evictions(total_steps, evictions)
    gaps = {after - before for before, after in itertools.pairwise((0, *points))}
    assert max(gaps) - min(gaps) <= 1


@given(runs_with_room(), st.integers(min_value=0, max_value=2**64))
def test_a_seed_gives_the_same_plan_each_time(run: tuple[int, int], seed: int | None) -> None:
    total_steps, evictions = run
    first = plan_evictions(total_steps, evictions, seed)
    assert plan_evictions(total_steps, evictions, seed) == first


def test_a_seeded_plan_never_changes_between_versions() -> None:
    assert plan_evictions(1000, 5, seed=7) == (117, 235, 447, 508, 715)


@given(runs_with_room(), st.integers(min_value=0, max_value=2**64))
def test_a_seeded_point_stays_nearer_to_its_own_place_than_to_a_neighbours(
    run: tuple[int, int], seed: int | None
) -> None:
    total_steps, evictions = run
    even = plan_evictions(total_steps, evictions)
    jittered = plan_evictions(total_steps, evictions, seed)
    smallest_gap = min(after - before for before, after in itertools.pairwise((0, *even)))
    assert all(2 * abs(j - e) < smallest_gap for j, e in zip(jittered, even, strict=True))


@given(st.integers(min_value=100, max_value=10_000))
def test_two_seeds_do_not_always_give_the_same_plan(total_steps: int) -> None:
    assert len({plan_evictions(total_steps, 5, seed) for seed in range(20)}) > 1


@given(LENGTHS, st.integers(min_value=1, max_value=1000), SEEDS)
def test_more_evictions_than_fit_are_refused_with_the_largest_number(
    total_steps: int, excess: int, seed: int | None
) -> None:
    largest = total_steps * 4 // 5
    with pytest.raises(UsageError, match=f"largest possible number is {largest}$"):
        plan_evictions(total_steps, largest + excess, seed)
    assert len(plan_evictions(total_steps, largest, seed)) == largest


def test_a_run_of_one_step_has_no_room() -> None:
    with pytest.raises(UsageError, match="largest possible number is 0"):
        plan_evictions(1, 1)


@given(st.integers(max_value=0))
def test_no_evictions_at_all_are_refused(evictions: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        plan_evictions(100, evictions)


@given(st.lists(st.integers(min_value=1, max_value=8), min_size=1, max_size=9))
def test_workers_are_parsed_one_width_an_attempt(widths: list[int]) -> None:
    assert parse_workers(",".join(map(str, widths)), virtual_ranks=8) == tuple(widths)


@pytest.mark.parametrize(
    "text", ["", "0", "5", "2,", "2,,1", "-1", "1.5", "two", "1_0", "2;1", "٢"]
)
def test_workers_outside_one_to_virtual_ranks_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 4"):
        parse_workers(text, virtual_ranks=4)


def test_a_short_list_of_widths_starts_over() -> None:
    assert [width_of(attempt, (4, 2, 1)) for attempt in range(1, 8)] == [4, 2, 1, 4, 2, 1, 4]


def test_one_width_holds_for_all_attempts() -> None:
    assert {width_of(attempt, (2,)) for attempt in range(1, 8)} == {2}
