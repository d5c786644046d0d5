"""States to save, and saving and loading them with kettle's storage."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from kettle.checkpoint.digest import Expected, ObjectDigest
from kettle.checkpoint.reader import CheckpointReader
from kettle.checkpoint.writer import CheckpointWriter

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits of any dtype, so NaNs are among them; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    content = torch.randint(0, high, sizes, dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor holds, with NaNs and whatever else `torch.equal` takes no interest in."""
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind with another content."""
    return torch.full(tensor.shape, 1, dtype=torch.uint8).to(tensor.dtype)


def save(
    filesystem: AbstractFileSystem,
    folder: str,
    state: Mapping[str, Any],
    *,
    group: dist.ProcessGroup,
    **options: Any,
) -> Mapping[str, ObjectDigest]:
    """Collective; the objects on the coordinator, nothing elsewhere."""
    writer = CheckpointWriter(filesystem, folder, **options)
    dcp.save(dict(state), storage_writer=writer, process_group=group)
    return writer.objects


def load(
    filesystem: AbstractFileSystem,
    folder: str,
    state: dict[str, Any],
    objects: Mapping[str, ObjectDigest],
    *,
    group: dist.ProcessGroup,
) -> None:
    """Collective; in place."""
    expected = {name: Expected(found.size_bytes, found.digest) for name, found in objects.items()}
    reader = CheckpointReader(filesystem, folder, objects=expected, uri="the-checkpoint")
    dcp.load(state, storage_reader=reader, process_group=group)


def cause(error: CheckpointException, *, rank: int = 0) -> BaseException:
    """What a rank itself raised."""
    return error.failures[rank][0]


def flip_bit(path: Path, position: int) -> None:
    """Flip one bit of a file, counted from its beginning."""
    with path.open("r+b") as file:
        file.seek(position // 8)
        (byte,) = file.read(1)
        file.seek(position // 8)
        file.write(bytes([byte ^ 1 << position % 8]))


def positions(path: Path, *, count: int, seed: int) -> list[int]:
    """The first and the last bit of a file, and random ones."""
    bits_of_file = path.stat().st_size * 8
    chosen = random.Random(seed).sample(range(bits_of_file), count)
    return [0, bits_of_file - 1, *chosen]
