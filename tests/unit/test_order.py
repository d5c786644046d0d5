import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.data.order import Order, Position, order_of, permute, sample_lanes
from kettle.errors import DataError
from kettle.hosting import plan_hosting
from support.experiments import tiny

orders = st.builds(
    Order,
    seed=st.integers(0, 2**63),
    samples=st.integers(40, 200),
    virtual_ranks=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    micro_batch=st.integers(1, 2),
)


@given(samples=st.integers(0, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 9))
def test_every_sample_has_one_place_in_an_epoch(samples: int, seed: int, epoch: int) -> None:
    assert sorted(permute(samples, seed=seed, epoch=epoch).tolist()) == list(range(samples))


def test_order_is_the_same_in_every_version_of_every_library() -> None:
    places = permute(1000, seed=17, epoch=3).astype("<i8").tobytes()
    assert hashlib.sha256(places).hexdigest()[:16] == "10c0959f7172ac1e"


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    found = {tuple(permute(50, seed=s, epoch=e).tolist()) for s in range(4) for e in range(4)}
    assert len(found) == 16


def test_permutation_looks_random() -> None:
    # A sample stays at its own place about once per permutation, whatever the length.
    fixed = [int((permute(997, seed=s, epoch=0) == np.arange(997)).sum()) for s in range(200)]
    assert 0.7 < sum(fixed) / len(fixed) < 1.3


@given(order=orders, data=st.data())
def test_ranks_together_consume_the_global_batches_in_order(
    order: Order, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, order.virtual_ranks))
    hosting = plan_hosting(
        virtual_ranks=order.virtual_ranks, world_size=world_size, exchange="auto"
    )
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    position = Position(epoch=1, sample_index=step * order.global_batch)
    streams = [
        list(order.micro_batches(position, rank=r, hosting=hosting)) for r in range(world_size)
    ]
    consumed = [s for stream in streams for batch in stream for s in batch]
    permutation = permute(order.samples, seed=order.seed, epoch=1)
    end = order.steps_per_epoch * order.global_batch
    assert sorted(consumed) == sorted(permutation[position.sample_index : end].tolist())


@given(order=orders, data=st.data())
def test_owner_of_a_place_is_its_micro_batch_dealt_in_turn(
    order: Order, data: st.DataObject
) -> None:
    virtual_rank = data.draw(st.integers(0, order.virtual_ranks - 1))
    micro = data.draw(st.integers(0, order.accumulation - 1))
    start = data.draw(st.integers(0, order.steps_per_epoch - 1)) * order.global_batch
    for place in order.places(start, virtual_rank=virtual_rank, micro=micro):
        assert place // order.micro_batch % order.virtual_ranks == virtual_rank


@given(order=orders)
def test_positions_walk_through_whole_global_batches_and_leave_the_tail_out(order: Order) -> None:
    position = Position(0, 0)
    for step in range(2 * order.steps_per_epoch + 1):
        start = order.settle(position)
        assert start.epoch == step // order.steps_per_epoch
        assert start.sample_index == step % order.steps_per_epoch * order.global_batch
        position = order.after_step(position)


def test_data_smaller_than_a_step_is_refused_with_both_numbers(tmp_path: object) -> None:
    experiment = tiny(str(tmp_path)).experiment
    with pytest.raises(DataError, match="7 samples, but one step consumes 8"):
        order_of(experiment, samples=7)


@given(ids=st.lists(st.integers(0, 10**9), min_size=6, max_size=6, unique=True))
def test_sample_lanes_add_up_in_any_order(ids: list[int]) -> None:
    pieces = [(range(p, p + 2), np.array(ids[p : p + 2])) for p in (0, 2, 4)]
    random.shuffle(pieces)
    parts = [sample_lanes(places, samples) for places, samples in pieces]
    whole = sample_lanes(range(6), np.array(ids))
    assert tuple(sum(lane) % 2**64 for lane in zip(*parts, strict=True)) == whole


@given(ids=st.lists(st.integers(0, 10**9), min_size=2, max_size=6, unique=True))
def test_sample_lanes_notice_two_samples_that_changed_places(ids: list[int]) -> None:
    swapped = [ids[1], ids[0], *ids[2:]]
    places = range(len(ids))
    assert sample_lanes(places, np.array(ids)) != sample_lanes(places, np.array(swapped))
