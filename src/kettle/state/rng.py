"""The random streams of each virtual rank."""

import random
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from kettle.determinism import derive_seed


@dataclass(frozen=True)
class StreamStates:
    """The state of every stream that code in a rank may draw from, as its library gives it.

    Attributes:
        python: of `random`.
        numpy: of `numpy.random`'s global generator.
        torch_cpu: uint8 [5056].
        torch_cuda: uint8 [16], or None on a CPU device.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None


def seeded(seed: int, *, virtual_rank: int, device: torch.device) -> StreamStates:
    """The streams that a virtual rank starts a run with; the global ones stay untouched."""
    with scratch(device):
        random.seed(derive_seed(seed, "python", virtual_rank))
        np.random.seed(derive_seed(seed, "numpy", virtual_rank) % 2**32)  # noqa: NPY002 - the global generator is the subject
        torch.default_generator.manual_seed(derive_seed(seed, "torch", virtual_rank))
        if device.type == "cuda":
            torch.cuda.manual_seed(derive_seed(seed, "cuda", virtual_rank))
        return capture(device)


def capture(device: torch.device) -> StreamStates:
    """Copy the state of the global streams."""
    return StreamStates(
        python=random.getstate(),
        numpy=np.random.get_state(legacy=False),  # noqa: NPY002
        torch_cpu=torch.get_rng_state(),
        torch_cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    )


def install(states: StreamStates, *, device: torch.device) -> None:
    """Make these the global streams."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)  # noqa: NPY002
    torch.set_rng_state(states.torch_cpu)
    if states.torch_cuda is not None:
        torch.cuda.set_rng_state(states.torch_cuda, device)


def to_tensors(states: StreamStates) -> dict[str, torch.Tensor]:
    """As a checkpoint holds it.

    Returns:
        `python` and `numpy`, int64 [625]: the words of the Mersenne Twister and the position in
        them. `python_gauss` and `numpy_gauss`, float64 [2]: whether a normal deviate is in hand,
        and which. `torch_cpu` and, on CUDA, `torch_cuda`, uint8.
    """
    _, python, gauss = states.python
    twister = states.numpy["state"]
    words = [*twister["key"].tolist(), twister["pos"]]
    cached = states.numpy["gauss"] if states.numpy["has_gauss"] else None
    tensors = {
        "python": torch.tensor(python, dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy": torch.tensor(words, dtype=torch.int64),
        "numpy_gauss": _optional(cached),
        "torch_cpu": states.torch_cpu.clone(),
    }
    if states.torch_cuda is not None:
        tensors["torch_cuda"] = states.torch_cuda.clone()
    return tensors


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> StreamStates:
    """The inverse of `to_tensors`."""
    has_python_gauss, python_gauss = tensors["python_gauss"].tolist()
    has_numpy_gauss, numpy_gauss = tensors["numpy_gauss"].tolist()
    *words, position = tensors["numpy"].tolist()
    return StreamStates(
        python=(3, tuple(tensors["python"].tolist()), python_gauss if has_python_gauss else None),
        numpy={
            "bit_generator": "MT19937",
            "state": {"key": np.array(words, dtype=np.uint32), "pos": position},
            "has_gauss": int(has_numpy_gauss),
            "gauss": numpy_gauss,
        },
        torch_cpu=tensors["torch_cpu"].clone(),
        torch_cuda=tensors["torch_cuda"].clone() if "torch_cuda" in tensors else None,
    )


@contextmanager
def scratch(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside leaves the global streams as they were."""
    before = capture(device)
    try:
        yield
    finally:
        install(before, device=device)


class VirtualRankStreams:
    """The streams of the virtual ranks that this rank hosts, as they are at the step boundary.

    A stream is in place only while its virtual rank works, so nothing that happens between two
    steps (saving, logging, making an iterator) can move it. What a step did to the streams counts
    when `finish_step` is called; a step that is dropped half way leaves no trace.
    """

    def __init__(self, states: Mapping[int, StreamStates], *, device: torch.device) -> None:
        self._device = device
        self.boundary = dict(states)
        self._moved: dict[int, StreamStates] = {}

    @contextmanager
    def of(self, virtual_rank: int | None) -> Iterator[None]:
        """Put a virtual rank's streams in place; None: scratch streams that are put back."""
        if virtual_rank is None:
            with scratch(self._device):
                yield
            return
        install(self.boundary[virtual_rank], device=self._device)
        yield
        self._moved[virtual_rank] = capture(self._device)

    def finish_step(self) -> None:
        """The step was applied: its end is the new boundary."""
        self.boundary.update(self._moved)
        self._moved.clear()

    def lanes(self) -> tuple[int, int]:
        """Two 64-bit sums that say where the streams stand once the step under way is finished.

        Sums of different ranks add up mod 2^64, so the total does not depend on their number.
        """
        lanes = [0, 0]
        for virtual_rank, states in (self.boundary | self._moved).items():
            content = _bytes(states)
            for lane in (0, 1):
                seed = 2 * virtual_rank + lane
                lanes[lane] += xxhash.xxh3_64_intdigest(content, seed=seed)
        return lanes[0] % 2**64, lanes[1] % 2**64

    def drop_step(self) -> None:
        """The step was dropped: the boundary stays where it was."""
        self._moved.clear()


class StreamsPart:
    """The checkpoint part of one virtual rank's streams (a `Stateful`)."""

    def __init__(self, streams: VirtualRankStreams, *, virtual_rank: int) -> None:
        self._streams = streams
        self._virtual_rank = virtual_rank

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The streams at the step boundary, as `to_tensors` writes them."""
        return to_tensors(self._streams.boundary[self._virtual_rank])

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the streams of a checkpoint."""
        self._streams.boundary[self._virtual_rank] = from_tensors(state)


def _bytes(states: StreamStates) -> bytes:
    _, words, gauss = states.python
    twister = states.numpy["state"]
    in_hand = (gauss, twister["pos"], states.numpy["has_gauss"], states.numpy["gauss"])
    parts = [
        array("Q", words).tobytes(),
        twister["key"].tobytes(),
        repr(in_hand).encode(),
        states.torch_cpu.numpy().tobytes(),
    ]
    if states.torch_cuda is not None:
        parts.append(states.torch_cuda.cpu().numpy().tobytes())
    return b"".join(parts)


def _optional(value: float | None) -> torch.Tensor:
    return torch.tensor([value is not None, value or 0.0], dtype=torch.float64)
