"""The gradient norm in canonical order: the same bits for any number of ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from kettle.distributed import Ranks
from kettle.reduction.tree import fold_columns

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements converted to float64 at a time: what a CPU's cache holds, what keeps a GPU busy."""


class CanonicalNorm:
    """Euclidean norm over all parameters, sharded by rows.

    Squares are float64 and summed by elementwise additions alone, first inside each row (sharding
    along dimension 0 never splits a row), then over the rows of all parameters in their order.
    """

    def __init__(self, shapes: Sequence[torch.Size], *, ranks: Ranks) -> None:
        self._ranks = ranks
        rows = [shape[0] if len(shape) else 1 for shape in shapes]
        self._shares = [_share(r, ranks.world_size) for r in rows]
        per_rank = [sum(share[rank] for share in self._shares) for rank in range(ranks.world_size)]
        self._padded = max(per_rank)
        self._canonical = self._places().to(ranks.device)

    def __call__(self, gradients: Sequence[torch.Tensor]) -> float:
        """The norm of these local shards together with all other ranks'; collective."""
        rows = row_squares(gradients)
        if self._ranks.world_size == 1:
            return _root(rows)
        mine = torch.zeros(self._padded, dtype=torch.float64, device=rows.device)
        mine[: len(rows)] = rows
        everyone = [torch.empty_like(mine) for _ in range(self._ranks.world_size)]
        dist.all_gather(everyone, mine)
        return _root(torch.cat(everyone)[self._canonical])

    def _places(self) -> torch.Tensor:
        """Where in the gathered rows each row of the canonical order stands."""
        starts = [rank * self._padded for rank in range(self._ranks.world_size)]
        places = []
        for share in self._shares:
            for rank, rows in enumerate(share):
                places.append(torch.arange(starts[rank], starts[rank] + rows))
                starts[rank] += rows
        return torch.cat(places)


def row_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of every row of every tensor, in order, float64 [all rows]."""
    rows = [tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1) for tensor in tensors]
    out = torch.empty(sum(len(r) for r in rows), dtype=torch.float64, device=tensors[0].device)
    start = 0
    for matrix in rows:
        at_once = max(1, _CHUNK_ELEMENTS[matrix.device.type] // matrix.shape[1])
        for chunk in matrix.split(at_once):
            if len(chunk):
                squares = chunk.double().square_()
                out[start : start + len(chunk)] = fold_columns(squares)
                start += len(chunk)
    return out


def _share(rows: int, world_size: int) -> list[int]:
    """Rows that each rank holds of a tensor: even chunks, rounded up, until none is left."""
    chunk = -(-rows // world_size)
    return [max(0, min(rows, (rank + 1) * chunk) - rank * chunk) for rank in range(world_size)]


def _root(rows: torch.Tensor) -> float:
    return float(fold_columns(rows.view(1, -1)).sqrt().item())
