import math

import pytest
import torch

from kettle.model import optim


@pytest.mark.parametrize("limit", [1, 5, 64, 10_000])
def test_batches_hold_every_element_once_and_in_order(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(optim._BATCH_ELEMENTS, "cpu", limit)
    weights = [torch.arange(12.0).view(3, 4), torch.arange(7.0), torch.empty(0, 4), torch.ones(1)]
    rows = [(weight, -weight) for weight in weights]
    cut = list(optim.batches(rows))
    for side in range(2):
        pieces = [piece.flatten() for batch in cut for piece in batch[side]]
        assert torch.equal(torch.cat(pieces), torch.cat([row[side].flatten() for row in rows]))
    assert all(sum(piece.numel() for piece in batch[0]) <= limit for batch in cut)
    assert len(cut) >= math.ceil(20 / limit)


def test_batches_write_through_to_the_tensors() -> None:
    weight = torch.zeros(3, 5)
    for (pieces,) in optim.batches([(weight,)]):
        torch._foreach_add_(pieces, 1.0)
    assert torch.equal(weight, torch.ones(3, 5))
