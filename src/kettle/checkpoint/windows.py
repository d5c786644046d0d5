"""Boxes of tensors in pieces that are small enough to be copied, and the memory of tensors.

Copying a whole tensor to have it contiguous or on the CPU would take its size in memory once more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from kettle.checkpoint.digest import BLOCK_BYTES

WINDOW_BYTES = 8 * BLOCK_BYTES


@dataclass(frozen=True)
class Window:
    """A box in a chunk, small enough to be copied at once.

    Attributes:
        starts: of the box, relative to the box that was cut up.
        offset: of its first byte in the chunk.
        span: bytes from its first to its last, gaps included.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    offset: int
    span: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that has the shape of the box that was cut up."""
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def byte_strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Of a row-major chunk."""
    return tuple(prod(sizes[dim + 1 :]) * itemsize for dim in range(len(sizes)))


def windows(
    sizes: Sequence[int], starts: Sequence[int], lengths: Sequence[int], *, itemsize: int
) -> Iterator[Window]:
    """Cut a box of a row-major chunk into windows of at most 8 MiB, in the order of their bytes.

    No window has a gap with a whole block in it, so whoever reads all blocks that a window
    touches reads none in vain.
    """
    if 0 in lengths:
        return
    strides = byte_strides(sizes, itemsize)
    offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    whole = Window((0,) * len(sizes), tuple(lengths), offset, 0)
    yield from _cut(whole, strides, itemsize=itemsize, dim=0)


def _cut(window: Window, strides: Sequence[int], *, itemsize: int, dim: int) -> Iterator[Window]:
    spans = [itemsize]  # of the dimensions from the last one to this one
    fits = True
    for length, stride in zip(window.lengths[:dim:-1], strides[:dim:-1], strict=True):
        fits &= length == 1 or stride - spans[-1] < BLOCK_BYTES
        spans.append(spans[-1] + (length - 1) * stride)
    inner = spans[-1]
    if dim == len(strides):
        yield replace(window, span=inner)
        return
    stride, length = strides[dim], window.lengths[dim]
    if not fits or inner > WINDOW_BYTES or (length > 1 and stride - inner >= BLOCK_BYTES):
        count = 1
    else:
        count = min(length, (WINDOW_BYTES - inner) // stride + 1)
    for start in range(0, length, count):
        part = Window(
            starts=(*window.starts[:dim], start, *window.starts[dim + 1 :]),
            lengths=(*window.lengths[:dim], min(count, length - start), *window.lengths[dim + 1 :]),
            offset=window.offset + start * stride,
            span=0,
        )
        if count == 1:
            yield from _cut(part, strides, itemsize=itemsize, dim=dim + 1)
        else:
            yield replace(part, span=inner + (part.lengths[dim] - 1) * stride)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor lie in this process's memory as they do in a file."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor, to be read or written in place."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is plain, or else a copy of it that is, from whatever device."""
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
