"""Gradient reduction for FSDP2: stock, or canonical, where the collective only moves data.

In canonical mode FSDP2's reduce-scatter is replaced by an all-to-all, which does no arithmetic,
and the leaves are summed afterwards by `LeafCounter`. Nothing is left to the collective library's
choice of order, so the same bits come out on any number of ranks and on any backend.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The base class of a custom reduce-scatter has no public name; the setter that takes it has.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from kettle.hosting import Hosting
from kettle.reduction.tree import LeafCounter


class Reduction(Protocol):
    """How one rank's gradients are summed over rounds and ranks."""

    def start_round(self, index: int) -> None:
        """The gradients that come next are the leaves of this round."""
        ...

    def drop_step(self) -> None:
        """Forget what is held of a step that is not finished."""
        ...


class CanonicalReduction:
    """Leaves are moved by a collective and summed in the order of their virtual ranks."""

    def __init__(self, modules: Sequence[FSDPModule], *, hosting: Hosting) -> None:
        self._hosting = hosting
        self._modules = [module for module in modules if isinstance(module, nn.Module)]
        world_size = len(hosting.rounds[0].virtual_ranks)
        self._units = [_Unit() if world_size > 1 else _UnitAlone() for _ in modules]
        for module, unit in zip(modules, self._units, strict=True):
            _sum_without_division(module, world_size=world_size)
            module.set_custom_reduce_scatter(unit)
            module.set_all_reduce_hook(unit.add_leaves)

    def start_round(self, index: int) -> None:
        """Set the gradients aside that earlier rounds left, so that FSDP2 adds nothing to them."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        round_ = self._hosting.rounds[index]
        last = index == len(self._hosting.rounds) - 1
        leaves = sum(v is not None for v in round_.virtual_ranks)
        for unit in self._units:
            unit.start_round(leaves, last=last, exchanges=last or self._hosting.exchange == "round")

    def drop_step(self) -> None:
        """Forget the leaves of the step so far."""
        for unit in self._units:
            unit.drop()


class NativeReduction:
    """The collective library's own reduce-scatter in every round; FSDP2 adds the rounds up."""

    def __init__(self, modules: Sequence[FSDPModule], *, hosting: Hosting) -> None:
        for module in modules:
            _sum_without_division(module, world_size=len(hosting.rounds[0].virtual_ranks))

    def start_round(self, index: int) -> None:
        """Nothing to prepare."""

    def drop_step(self) -> None:
        """Nothing is held outside the parameters' gradients."""


def _sum_without_division(module: FSDPModule, *, world_size: int) -> None:
    # Loss is normalised by an exact token count, never by the number of ranks. Alone, FSDP2 does
    # not divide unless it is told to, and then it does so even by 1.
    if world_size > 1:
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(enable=True)


class _Unit(ReduceScatter):
    """The reduction of one sharded module's flat float32 gradients.

    FSDP2 calls the object itself with the flat gradient of this rank (only for W > 1), and
    `add_leaves` with the buffer that becomes the sharded gradient. The buffer holds a true value
    only in a step's last round; the caller clears gradients after every other.
    """

    def __init__(self) -> None:
        self._subtree = LeafCounter()
        self._leaves = LeafCounter()
        self._received: torch.Tensor | None = None
        self._sent = False

    def start_round(self, leaves: int, *, last: bool, exchanges: bool) -> None:
        self._active = leaves
        self._last = last
        self._exchanges = exchanges

    def drop(self) -> None:
        self._subtree.clear()
        self._leaves.clear()
        self._received = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,  # noqa: ARG002 - add_leaves fills it
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002 - the interface's; nothing is reduced on the way
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - the interface's
    ) -> None:
        self._sent = True
        _keep_until_done(input_tensor)
        self._subtree.push(input_tensor)
        if not self._exchanges:
            return
        subtree = self._subtree.total()
        received = torch.empty_like(subtree)
        dist.all_to_all_single(received, subtree, group=group)
        self._received = received.view(group.size(), -1)

    def add_leaves(self, reduced: torch.Tensor) -> None:
        """Sum what this round brought; in the last round write the step's sum into `reduced`."""
        if self._received is not None:
            _keep_until_done(self._received)
            # Idle ranks stand at the end of a round. Their rows are dropped by index: multiplying
            # by zero would let a NaN through.
            for leaf in self._received[: self._active]:
                self._leaves.push(leaf)
            self._received = None
            if not self._last:
                self._leaves.compact()
        elif not self._sent:
            _keep_until_done(reduced)
            self._leaves.push(reduced)  # W = 1: FSDP2 made no collective
        self._sent = False
        if self._last:
            total = self._leaves.total()
            if total is not reduced:
                reduced.copy_(total)


class _UnitAlone(_Unit):
    """The reduction where there is one rank: FSDP2 makes no collective.

    Instead it copies its input buffer to its output buffer, so both are the same one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        output, self._input = self._input, None
        return output


def _keep_until_done(tensor: torch.Tensor) -> None:
    """Tell CUDA's allocator that the current stream, which did not allocate it, still uses it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
