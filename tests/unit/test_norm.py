import math

import pytest
import torch

from kettle.reduction import norm


@pytest.mark.parametrize("elements_at_once", [1, 7, 100, 1 << 18])
def test_row_squares_do_not_depend_on_how_many_rows_are_converted_at_once(
    elements_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for shape in ((9, 87), (56,), (4, 3, 5))]
    expected = norm.row_squares(tensors)
    monkeypatch.setitem(norm._CHUNK_ELEMENTS, "cpu", elements_at_once)
    assert torch.equal(norm.row_squares(tensors), expected)


def test_row_squares_are_the_sums_of_squares() -> None:
    matrix = torch.tensor([[3.0, 4.0, 12.0], [0.0, 1.0, 2.0]])
    assert norm.row_squares([matrix, torch.tensor([-2.0])]).tolist() == [169.0, 5.0, 4.0]


def test_gradients_are_not_written_to() -> None:
    matrix = torch.full((2, 2), math.pi)
    norm.row_squares([matrix])
    assert torch.equal(matrix, torch.full((2, 2), math.pi))
