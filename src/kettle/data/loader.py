"""Micro-batches of one rank: a loader per epoch, started at an explicit position."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kettle.config import DataConfig
from kettle.data import sources
from kettle.data.order import Order, Position
from kettle.data.processes import CONTEXT, SharedArray, end_with_rank, start_server
from kettle.hosting import Hosting

IGNORED = -100
"""Label of a token that is not learned."""

MicroBatch: TypeAlias = dict[str, torch.Tensor]
"""`sample_ids` [B], `input_ids` [B, S] and `labels` [B, S], all int64."""


class Samples(Protocol):
    """Rows by index: each holds `input_ids` and `labels`, int64 arrays of one length S."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Dataset:
    """What a run trains on.

    Attributes:
        samples: may be read in loader processes, so they must be picklable, and reading must draw
            no random number.
        digest: SHA-256 of the content, part of the fingerprint.
        transform: applied to each micro-batch in the rank itself with its virtual rank's random
            streams in place; here it may draw.
    """

    samples: Samples
    digest: str
    transform: Callable[[MicroBatch], MicroBatch] = lambda batch: batch


class TokenRows:
    """Samples over an array of tokens [samples, S + 1]."""

    def __init__(self, tokens: sources.Tokens) -> None:
        self._tokens = SharedArray(tokens)

    def __len__(self) -> int:
        return len(self._tokens.array)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._tokens.array[index]
        return {"input_ids": row[:-1], "labels": row[1:]}


def open_dataset(config: DataConfig, *, path: str | None) -> Dataset:
    """Read, digest and cut the configured text. Raises DataError."""
    documents = sources.read_documents(config, path=path)
    return Dataset(
        samples=TokenRows(sources.cut(documents, config)), digest=sources.digest(documents)
    )


class MicroBatches:
    """The stream of one rank's micro-batches across epochs.

    It keeps no position of its own that could go stale: `start_step` says where the step begins,
    and only an epoch's first step makes a new loader.
    """

    def __init__(
        self, dataset: Dataset, *, order: Order, rank: int, hosting: Hosting, processes: int
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._rank = rank
        self._hosting = hosting
        self._processes = processes
        self._next: Position | None = None
        self._iterator: Iterator[MicroBatch] = iter(())
        if processes:
            start_server()  # now, since its imports take seconds, and so do the rank's own

    def start_step(self, position: Position) -> None:
        """Stand at a settled step boundary; cheap when the last step ended there."""
        if position != self._next:
            self.close()  # the last epoch's processes make room for this one's
            self._iterator = self._open(position)
        self._next = self._order.settle(self._order.after_step(position))
        if self._next.epoch != position.epoch:
            self._next = None  # the next step is another epoch's first and needs its own loader

    def take(self) -> MicroBatch:
        """The next micro-batch of this rank in the order of `Order.micro_batches`."""
        return next(self._iterator)

    def idle_batch(self) -> MicroBatch:
        """A batch of the usual shape for a rank that hosts nothing in a round."""
        width = len(self._dataset.samples[0]["input_ids"])
        shape = (self._order.micro_batch, width)
        return {
            "sample_ids": torch.full((self._order.micro_batch,), -1),
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, IGNORED),
        }

    def close(self) -> None:
        """Let the loader's processes go."""
        self._iterator = iter(())
        self._next = None

    def _open(self, position: Position) -> Iterator[MicroBatch]:
        indices = _EpochSampler(self._order, position, rank=self._rank, hosting=self._hosting)
        if self._processes:
            start_server()
        with warnings.catch_warnings():
            # torchdata 0.11 calls what torch 2.13 deprecates; nothing that a user could act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return iter(
                StatefulDataLoader(
                    _Indexed(self._dataset.samples),
                    batch_sampler=indices,
                    num_workers=self._processes,
                    collate_fn=_collate,
                    # Making an iterator draws a seed; from a generator of its own it moves no
                    # other stream.
                    generator=torch.Generator(),
                    multiprocessing_context=CONTEXT if self._processes else None,
                    worker_init_fn=end_with_rank,
                )
            )


class _EpochSampler(Sampler[list[int]]):
    def __init__(self, order: Order, position: Position, *, rank: int, hosting: Hosting) -> None:
        self._order = order
        self._position = position
        self._rank = rank
        self._hosting = hosting

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.micro_batches(self._position, rank=self._rank, hosting=self._hosting)


@dataclass(frozen=True)
class _Indexed:
    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"sample_ids": index, **self.samples[index]}


def _collate(rows: Sequence[Mapping[str, Any]]) -> MicroBatch:
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
