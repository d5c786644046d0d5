"""The order of samples: a pure function of (seed, epoch), and who owns a place in it.

The samples of an epoch are laid out in a permutation. A step takes the next `global_batch` places
of it; the micro-batches in a step are dealt to the virtual ranks in turn, so place p belongs to
virtual rank (p // micro_batch) mod virtual_ranks.

Tail rule: the last `samples mod global_batch` places of each epoch's permutation are left out of
that epoch. Every epoch leaves out others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kettle.config import ExperimentConfig
from kettle.errors import DataError
from kettle.hosting import Hosting

Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """A step boundary in the data.

    Attributes:
        epoch: counted from 0.
        sample_index: places of this epoch's permutation that are consumed.
    """

    epoch: int
    sample_index: int


@dataclass(frozen=True)
class Order:
    """The sample order of an experiment."""

    seed: int
    samples: int
    virtual_ranks: int
    accumulation: int
    micro_batch: int

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.virtual_ranks * self.accumulation * self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch; the rest is the tail."""
        return self.samples // self.global_batch

    def settle(self, position: Position) -> Position:
        """The same boundary, named by the epoch that the next step belongs to."""
        if position.sample_index + self.global_batch > self.samples:
            return Position(epoch=position.epoch + 1, sample_index=0)
        return position

    def after_step(self, position: Position) -> Position:
        """The boundary one step later."""
        start = self.settle(position)
        return Position(start.epoch, start.sample_index + self.global_batch)

    def places(self, step_start: int, *, virtual_rank: int, micro: int) -> range:
        """The places that one micro-batch of one virtual rank takes in the step at `step_start`."""
        first = step_start + (micro * self.virtual_ranks + virtual_rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def micro_batches(
        self, position: Position, *, rank: int, hosting: Hosting
    ) -> Iterator[list[int]]:
        """Sample indices of each micro-batch that a rank consumes, from here to the epoch's end."""
        permutation = permute(self.samples, seed=self.seed, epoch=position.epoch)
        last_start = self.samples - self.global_batch
        for start in range(position.sample_index, last_start + 1, self.global_batch):
            for virtual_rank in hosting.hosted_by(rank):
                for micro in range(self.accumulation):
                    places = self.places(start, virtual_rank=virtual_rank, micro=micro)
                    yield permutation[places.start : places.stop].tolist()


def order_of(experiment: ExperimentConfig, *, samples: int) -> Order:
    """The order of an experiment over so many samples.

    Raises:
        DataError: there are fewer samples than one step consumes.
    """
    order = Order(
        seed=experiment.seed,
        samples=samples,
        virtual_ranks=experiment.virtual_ranks,
        accumulation=experiment.accumulation,
        micro_batch=experiment.micro_batch,
    )
    if not order.steps_per_epoch:
        raise DataError(
            f"the data has {samples} samples, but one step consumes {order.global_batch} "
            "(virtual_ranks x accumulation x micro_batch); add data or make one of them smaller"
        )
    return order


def permute(samples: int, *, seed: int, epoch: int) -> Indices:
    """A permutation of 0..samples-1, int64, that depends on nothing but its arguments.

    Indices are sorted by a 64-bit hash of (seed, epoch, index), so no library's generator, which
    another version may change, has a part in it.
    """
    key = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    hashes = mix(np.arange(samples, dtype=np.uint64) ^ key)
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), elementwise mod 2^64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_lanes(places: range, sample_ids: Indices) -> tuple[int, int]:
    """Two 64-bit sums that say which sample was consumed at which place.

    Sums of different micro-batches add up mod 2^64 in any order, so the ranks' sums can be
    all-reduced and the total does not depend on their number.
    """
    at = mix(np.arange(places.start, places.stop, dtype=np.uint64))
    first = mix(at ^ sample_ids.astype(np.uint64))
    second = mix(first + np.uint64(1))
    return int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))
