import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kettle.state.rng import (
    StreamsPart,
    VirtualRankStreams,
    capture,
    from_tensors,
    install,
    scratch,
    seeded,
    to_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def draw() -> list[float]:
    """From every stream, normal deviates included: they keep one in hand."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),  # noqa: NPY002 - the global generator is the subject
        np.random.normal(),  # noqa: NPY002
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


def streams() -> VirtualRankStreams:
    states = {v: seeded(3, virtual_rank=v, device=CPU) for v in (0, 1)}
    return VirtualRankStreams(states, device=CPU)


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 700])
def test_captured_streams_survive_the_way_through_tensors(drawn_before: int) -> None:
    for _ in range(drawn_before):
        draw()
    states = from_tensors(to_tensors(capture(CPU)))
    expected = [draw() for _ in range(3)]
    install(states, device=CPU)
    assert [draw() for _ in range(3)] == expected


def test_virtual_ranks_start_with_streams_of_their_own() -> None:
    held = streams()
    drawn = []
    for v in (0, 1):
        with held.of(v):
            drawn.append(draw())
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_streams_of_a_virtual_rank_do_not_depend_on_who_works_between() -> None:
    alone, mixed = streams(), streams()
    with alone.of(1):
        expected = draw()
    with mixed.of(0):
        draw()
    draw()  # something between two virtual ranks
    with mixed.of(1):
        assert draw() == expected


def test_finished_step_moves_the_boundary() -> None:
    held = streams()
    with held.of(0):
        first = draw()
    held.finish_step()
    with held.of(0):
        assert draw() != first


def test_dropped_step_leaves_the_boundary_where_it_was() -> None:
    held = streams()
    with held.of(0):
        first = draw()
    held.drop_step()
    with held.of(0):
        assert draw() == first


def test_boundary_does_not_move_while_a_step_is_under_way() -> None:
    held = streams()
    part = StreamsPart(held, virtual_rank=0)
    before = part.state_dict()
    with held.of(0):
        draw()
    assert all(part.state_dict()[key].equal(before[key]) for key in before)


def test_idle_draws_leave_no_trace() -> None:
    held = streams()
    outside = capture(CPU)
    expected = draw()
    install(outside, device=CPU)
    with held.of(None):
        draw()
    assert draw() == expected


def test_scratch_puts_streams_back_after_an_error() -> None:
    outside = capture(CPU)
    expected = draw()
    install(outside, device=CPU)

    def fail() -> None:
        with scratch(CPU):
            draw()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised two lines above
        fail()
    assert draw() == expected


def test_seeding_leaves_the_global_streams_alone() -> None:
    outside = capture(CPU)
    expected = draw()
    install(outside, device=CPU)
    seeded(1, virtual_rank=0, device=CPU)
    assert draw() == expected


def test_restored_part_goes_on_where_the_saved_one_stood() -> None:
    saved, restored = streams(), streams()
    with saved.of(1):
        draw()
    saved.finish_step()
    StreamsPart(restored, virtual_rank=1).load_state_dict(
        StreamsPart(saved, virtual_rank=1).state_dict()
    )
    with saved.of(1):
        expected = draw()
    with restored.of(1):
        assert draw() == expected


def test_lanes_say_where_the_streams_stand_after_the_step() -> None:
    one, other = streams(), streams()
    assert one.lanes() == other.lanes()
    with one.of(0):
        random.random()
    assert one.lanes() != other.lanes()
    with other.of(0):
        random.random()
    assert one.lanes() == other.lanes()


@pytest.mark.parametrize("stream", range(6))
def test_lanes_notice_each_stream(stream: int) -> None:
    moved = streams()
    draws: list[Callable[[], object]] = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.random,
        np.random.normal,
        lambda: torch.rand(()),
        lambda: torch.randn(()),
    ]
    with moved.of(1):
        draws[stream]()
    assert moved.lanes() != streams().lanes()


def test_lanes_of_swapped_virtual_ranks_differ() -> None:
    swapped = streams()
    swapped.boundary[0], swapped.boundary[1] = swapped.boundary[1], swapped.boundary[0]
    assert swapped.lanes() != streams().lanes()


def test_lanes_of_a_step_that_was_dropped_do_not_count() -> None:
    dropped = streams()
    with dropped.of(0):
        random.random()
    dropped.drop_step()
    assert dropped.lanes() == streams().lanes()
