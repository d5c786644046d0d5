"""How long training stands still for a save beside it, against one that it waits for."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from kettle.checkpoint.background import BackgroundSave
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.writer import CheckpointWriter
from kettle.distributed import Ranks, barrier, join
from measure import Samples, interleave

WAITED, BESIDE, ALONE = "save that is waited for", "step beside a save", "step alone"

STEP_S = 1.0
"""How long the computation of a step takes when nothing else goes on."""

WARMUP = 2


@dataclass(frozen=True)
class Blocking:
    """Times by arm, and for each step beside a save how many seconds it stood still for it."""

    samples: Samples
    stood_still_s: list[float]


def blocked_arms(state: Any, folder: str, *, repetitions: int, title: str | None) -> Blocking:
    """Times of a synchronous save, of a step beside a background save, and of a step alone.

    A step beside a save begins the save, computes as it would, and waits until the optimizer may
    change the state. The save goes on to its end outside of what is timed.
    """
    ranks = join("cpu", device=torch.device("cpu"), timeout=timedelta(minutes=5))
    background: BackgroundSave[str] = BackgroundSave(ranks)
    compute = _computation()
    stood_still_s: list[float] = []

    def writer(name: str, cancelled: threading.Event | None = None) -> CheckpointWriter:
        return CheckpointWriter(DurableLocalFileSystem(), f"{folder}/{name}", cancelled=cancelled)

    def beside() -> None:
        started = time.perf_counter()
        cancelled = threading.Event()
        background.start(
            1,
            {"model": dict(state)},
            writer=writer("background", cancelled),
            cancelled=cancelled,
            finish=_written,
        )
        begun = time.perf_counter()
        compute()
        computed = time.perf_counter()
        background.wait_until_copied()
        stood_still_s.append(begun - started + time.perf_counter() - computed)

    samples = interleave(
        {
            WAITED: lambda: dcp.save(dict(state), storage_writer=writer("waited")),
            BESIDE: beside,
            ALONE: compute,
        },
        repetitions=repetitions,
        warmup=WARMUP,
        meet=_settled(background, ranks, folder),
        title=title,
    )
    if background.step is not None:
        background.finish()
    return Blocking(samples, stood_still_s[WARMUP:])


def _computation() -> Callable[[], None]:
    """Matrix products of one thread that take about STEP_S."""
    left, right = torch.rand(512, 512), torch.rand(512, 512)
    for _ in range(20):
        left @ right
    started = time.perf_counter()
    for _ in range(50):
        left @ right
    count = max(1, round(STEP_S / (time.perf_counter() - started) * 50))

    def compute() -> None:
        for _ in range(count):
            left @ right

    return compute


def _written(written: Future[object], _blocked_ms: Callable[[], float]) -> str:
    written.result()
    return "written"


def _settled(background: BackgroundSave[str], ranks: Ranks, folder: str) -> Callable[[], None]:
    """Meet before and after an arm, with nothing in flight before one."""
    before_an_arm = [True]

    def meet() -> None:
        if before_an_arm[0]:
            if background.step is not None:
                background.finish()
            barrier(ranks)
            if ranks.is_first:
                for name in ("waited", "background"):
                    shutil.rmtree(Path(folder) / name, ignore_errors=True)
        before_an_arm[0] = not before_an_arm[0]
        barrier(ranks)

    return meet
