from hypothesis import given
from hypothesis import strategies as st

from kettle.checkpoint.layout import Place
from kettle.checkpoint.retention import every, kept, latest


def place(step: int, generation: int = 1) -> Place:
    return Place(step=step, generation=generation, name=f"step-{step:08d}-g{generation:04d}-a")


PLACES = [place(step) for step in (10, 20, 30, 40, 50)]


def test_latest_keeps_the_newest_steps() -> None:
    assert kept(PLACES, [latest(2)]) == {place(40), place(50)}


def test_every_keeps_multiples_for_good() -> None:
    assert kept(PLACES, [every(20)]) == {place(20), place(40)}


def test_policies_keep_what_any_of_them_keeps() -> None:
    assert kept(PLACES, [latest(1), every(20)]) == {place(20), place(40), place(50)}


def test_of_two_writers_of_one_step_every_keeps_the_newer() -> None:
    assert kept([place(20, 1), place(20, 3), place(20, 2)], [every(20)]) == {place(20, 3)}


def test_step_counts_before_generation() -> None:
    assert kept([place(30, 1), place(20, 9)], [latest(1)]) == {place(30, 1)}


@given(st.sets(st.tuples(st.integers(1, 99), st.integers(1, 4))), st.integers(1, 5))
def test_newest_is_always_kept_whatever_the_order(found: set[tuple[int, int]], count: int) -> None:
    places = [place(*each) for each in found]
    keep = kept(places, [latest(count), every(7)])
    assert keep == kept(places[::-1], [latest(count), every(7)])
    assert not places or max(places) in keep
