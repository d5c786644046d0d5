"""Summation in an order that depends on nothing but the number of summands."""

import torch


class LeafCounter:
    """Sums leaves pairwise as they come, like a binary counter carries.

    Leaf i always meets the same partners, whatever rank it came from and whenever it arrived, so
    the sum's bits depend only on the leaves and their number. At most log2(n) + 1 partial sums
    are held. The idea of fixed virtual workers with a fixed order of reduction is EasyScale's
    (Li et al., SC '23).

    Pushed tensors belong to the counter and are written to: a sum stands in its newest leaf.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, torch.Tensor]] = []

    def push(self, leaf: torch.Tensor) -> None:
        """Add the next leaf."""
        size = 1
        while self._partial and self._partial[-1][0] == size:
            _, older = self._partial.pop()
            leaf.add_(older)
            size *= 2
        self._partial.append((size, leaf))

    def total(self) -> torch.Tensor:
        """The sum of all leaves pushed since the last total; the counter is empty afterwards."""
        _, total = self._partial.pop()
        while self._partial:
            _, older = self._partial.pop()
            total.add_(older)
        return total

    def compact(self) -> None:
        """Copy partial sums out of the larger buffers that they may be views of."""
        self._partial = [(size, partial.clone()) for size, partial in self._partial]

    def clear(self) -> None:
        """Forget the leaves of a step that is dropped."""
        self._partial.clear()


def fold_columns(values: torch.Tensor) -> torch.Tensor:
    """Sum [rows, columns] over the columns to [rows], by elementwise additions of halves.

    Each row's sum has the bits it would have alone: `sum(1)` of a row depends on how many rows
    stand beside it. `values` is overwritten.
    """
    columns = values.shape[1]
    while columns > 1:
        half = columns // 2
        # add_ and not +=, which would copy the sum over itself once more.
        if columns % 2:
            values[:, 0].add_(values[:, columns - 1])
        values[:, :half].add_(values[:, half : 2 * half])
        columns = half
    return values[:, 0]
