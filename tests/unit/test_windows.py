from math import prod

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kettle.checkpoint.digest import BLOCK_BYTES
from kettle.checkpoint.windows import WINDOW_BYTES, is_plain, memory_of, plain, windows
from support.shards import bits, noise


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """A chunk of some MiB, a box in it, and the bytes of an element."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 700, 1_100, 3_000]), max_size=4))
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    assume(prod(sizes) * itemsize <= 40 << 20)
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [
        draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)
    ]
    return sizes, starts, lengths, itemsize


@given(box=boxes())
def test_windows_are_small_in_order_and_make_up_the_box(
    box: tuple[list[int], list[int], list[int], int],
) -> None:
    sizes, starts, lengths, itemsize = box
    # The number of each element, so that a window can be checked against the bytes it claims.
    wanted = torch.arange(prod(sizes)).reshape(sizes)
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        wanted = wanted.narrow(dim, start, length)
    covered = 0
    end = 0
    for window in windows(sizes, starts, lengths, itemsize=itemsize):
        part = window.of(wanted).reshape(-1)
        first, last = int(part[0]), int(part[-1])
        assert window.offset == first * itemsize
        assert window.span == (last - first + 1) * itemsize
        assert window.span <= WINDOW_BYTES
        assert window.offset >= end
        end = window.offset + window.span
        gaps = (part[1:] - part[:-1] - 1) * itemsize
        assert not len(gaps) or int(gaps.max()) < BLOCK_BYTES
        covered += part.numel()
    assert covered == wanted.numel()


def test_an_empty_box_has_no_windows() -> None:
    assert list(windows((4, 4), (0, 0), (4, 0), itemsize=4)) == []


def test_a_scalar_is_one_window() -> None:
    (window,) = windows((), (), (), itemsize=8)
    assert (window.offset, window.span) == (0, 8)


def test_memory_of_a_tensor_is_its_own() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    memory_of(tensor)[:2] = b"\x80\x3f"
    assert tensor.tolist() == [1, 0, 0, 0]


def test_only_what_lies_in_memory_as_in_a_file_is_plain() -> None:
    matrix = noise(4, 6, dtype=torch.complex64)
    assert is_plain(matrix)
    assert is_plain(matrix[1:3])
    for other in (matrix.t(), matrix[:, 1:], matrix.conj(), torch.empty(3, device="meta")):
        assert not is_plain(other)
    assert plain(matrix) is matrix
    assert bits(plain(matrix.t())) == bits(matrix.t().contiguous())
    assert bits(plain(matrix.conj())) == bits(matrix.conj().resolve_conj())
