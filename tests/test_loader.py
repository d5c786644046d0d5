"""Loader processes read the samples that the rank would read itself."""

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

from kettle.data.loader import Dataset, MicroBatch, MicroBatches, TokenRows
from kettle.data.order import Order, Position
from kettle.hosting import plan_hosting

LENGTH = 11


def token_rows(count: int) -> TokenRows:
    generator = np.random.Generator(np.random.PCG64(5))
    return TokenRows(generator.integers(0, 257, (count, LENGTH + 1), dtype=np.int64))


ORDER = Order(seed=5, samples=29, virtual_ranks=2, micro_batch=2, accumulation=2)
START = Position(epoch=0, sample_index=0)


def micro_batches(*, processes: int) -> MicroBatches:
    return MicroBatches(
        Dataset(samples=token_rows(ORDER.samples), digest="noise"),
        order=ORDER,
        rank=0,
        hosting=plan_hosting(virtual_ranks=2, world_size=1, exchange="auto"),
        processes=processes,
    )


def two_epochs(*, processes: int) -> Iterator[MicroBatch]:
    batches = micro_batches(processes=processes)
    position = START
    while position.epoch < 2:
        batches.start_step(position)
        for _ in range(4):
            yield batches.take()
        position = ORDER.settle(ORDER.after_step(position))
    batches.close()


def test_loader_processes_change_no_micro_batch() -> None:
    for read, expected in zip(two_epochs(processes=2), two_epochs(processes=0), strict=True):
        assert read.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(read[key], value)


def test_rank_that_ends_with_a_loader_open_does_not_wait_for_its_processes() -> None:
    # As after an error, which may keep everything alive until the interpreter goes.
    code = (
        "from test_loader import START, micro_batches\n"
        "batches = micro_batches(processes=2)\n"
        "batches.start_step(START)\n"
        "batches.take()\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.fixture
def no_sharer_left() -> Iterator[None]:
    """What Python starts to hand descriptors over where no process is being started."""
    yield
    resource_sharer.stop()


@pytest.mark.usefixtures("no_sharer_left")
def test_loader_process_is_not_sent_the_tokens_themselves() -> None:
    rows = token_rows(10_000)
    sent = ForkingPickler.dumps(rows)
    assert len(sent) < 1_000
    opened = ForkingPickler.loads(sent)
    assert len(opened) == len(rows)
    assert np.array_equal(opened[9_999]["labels"], rows[9_999]["labels"])
