"""A digest of sharded tensors that does not depend on the number of ranks."""

import hashlib
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from kettle.distributed import Ranks, exact_sum

# Odd constants of SplitMix64's finaliser, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_CHUNK_ELEMENTS = 1 << 20


def weights_digest(tensors: Mapping[str, torch.Tensor], *, ranks: Ranks) -> str:
    """SHA-256 (64 hex digits) over the bits of all weights; collective.

    Every element is hashed together with its place in the whole tensor; the hashes of a tensor are
    summed in two lanes mod 2^64, which is exact in any order, and the sums go into SHA-256 with
    the names and shapes.
    """
    lanes = torch.stack([_lanes(tensor, ranks=ranks) for tensor in tensors.values()])
    exact_sum(lanes, ranks=ranks)
    total = hashlib.sha256()
    for (name, tensor), pair in zip(tensors.items(), lanes.tolist(), strict=True):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {pair}\n".encode())
    return total.hexdigest()


def _lanes(tensor: torch.Tensor, *, ranks: Ranks) -> torch.Tensor:
    """This rank's share of a tensor's two sums, int64 [2] on the CPU."""
    if isinstance(tensor, DTensor):
        shard = tensor.to_local().detach()
        rows_per_rank = -(-tensor.shape[0] // ranks.world_size)
        start = ranks.rank * rows_per_rank * (tensor.numel() // tensor.shape[0])
    else:
        # Every rank holds all of it; one of them counts it.
        shard = tensor.detach() if ranks.is_first else tensor.detach()[:0]
        start = 0
    bits = shard.contiguous().view(-1).view(_integer_type(tensor.dtype))
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK_ELEMENTS):
        places = torch.arange(start, start + len(chunk), device=bits.device)
        start += len(chunk)
        first = _mix(_mix(places) ^ chunk.long())
        total += torch.stack([first.sum(), _mix(first + 1).sum()])
    return total.cpu()


def _mix(values: torch.Tensor) -> torch.Tensor:
    z = values + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift(z, 31)


def _shift(values: torch.Tensor, places: int) -> torch.Tensor:
    # torch shifts int64 with the sign; the mask makes it the unsigned shift.
    return (values >> places) & ((1 << (64 - places)) - 1)


def _integer_type(dtype: torch.dtype) -> torch.dtype:
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
