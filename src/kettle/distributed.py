"""Process group up and down, the device of a rank, and exact agreement between ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kettle.errors import KettleError, UsageError

T = TypeVar("T")

_NEVER = 2**62


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: processes of this attempt.
        device: where this rank computes.
        mesh: the one-dimensional mesh that parameters are sharded over.
        control: a gloo group of its own for flags, sums and checkpoints. On the default group
            they could interleave with training's collectives, and both sides would hang.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0


def choose_device_kind(
    wanted: Literal["auto", "cpu", "cuda"], *, local_world_size: int
) -> Literal["cpu", "cuda"]:
    """The kind of device all ranks of this attempt use. Raises UsageError."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available < local_world_size):
        return "cpu"
    if available < local_world_size:
        raise UsageError(
            f'runtime.device = "cuda" needs a GPU for each worker: there are {local_world_size} '
            f'workers and {available} visible GPUs; use fewer workers or device = "cpu"'
        )
    return "cuda"


@contextmanager
def process_group(wanted: Literal["auto", "cpu", "cuda"], *, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, ...); collective.

    Without these variables the process is the only rank and no port is opened.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = choose_device_kind(wanted, local_world_size=world_size)
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    try:
        yield join(kind, device=device, timeout=timeout)
    finally:
        dist.destroy_process_group()


def join(kind: str, *, device: torch.device, timeout: timedelta) -> Ranks:
    """Mesh and control group over an initialised default group; collective."""
    world_size = dist.get_world_size()
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        mesh=init_device_mesh(kind, (world_size,)),
        control=dist.new_group(backend="gloo", timeout=timeout),
    )


def earliest(at_monotonic_s: float | None, *, ranks: Ranks) -> float | None:
    """The earliest time that any rank passes, or None if none passes one; collective.

    Every rank gets the same answer, rounded down to whole microseconds.
    """
    if ranks.world_size == 1:
        return at_monotonic_s
    mine = _NEVER if at_monotonic_s is None else int(at_monotonic_s * 1e6)
    first = torch.tensor([mine], dtype=torch.int64)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=ranks.control)
    agreed = int(first.item())
    return None if agreed == _NEVER else agreed / 1e6


def exact_sum(values: torch.Tensor, *, ranks: Ranks) -> torch.Tensor:
    """Sum an int64 CPU tensor over all ranks, mod 2^64; collective.

    Integer addition is associative, so no order of summation changes the result.
    """
    assert values.dtype == torch.int64
    if ranks.world_size > 1:
        dist.all_reduce(values, group=ranks.control)
    return values


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here; collective."""
    if ranks.world_size > 1:
        dist.barrier(group=ranks.control)


def told_by_first(ask: Callable[[], T], *, ranks: Ranks) -> T:
    """What `ask` gives on rank 0, or the error it raises there, on every rank; collective.

    Only rank 0 calls `ask`, so it must do nothing that the other ranks have to take part in.
    """
    box: list[T | KettleError | None] = [None]
    if ranks.is_first:
        try:
            box = [ask()]
        except KettleError as error:
            box = [error]
        except Exception as error:
            # Its class may mean nothing elsewhere, but the others must not wait for an answer.
            box = [KettleError(f"rank 0 says {type(error).__name__}: {error}")]
            dist.broadcast_object_list(box, src=0, group=ranks.control)
            raise
    dist.broadcast_object_list(box, src=0, group=ranks.control)
    if isinstance(box[0], KettleError):
        raise box[0]
    return cast("T", box[0])


def gather_texts(texts: list[str], *, ranks: Ranks) -> list[str]:
    """The lists of all ranks, joined in rank order; collective."""
    boxes: list[list[str]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(boxes, texts, group=ranks.control)
    return [text for box in boxes for text in box]
