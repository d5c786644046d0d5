"""The parts of a run: one mapping of name to `Stateful`, all of whose values are tensors.

A part's `state_dict` describes the last step boundary. Keys are global: what differs between
virtual ranks is keyed by the virtual rank, since a sharded checkpoint keeps one value per key and
would silently drop the others. Among the values there are no pickled objects.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class Part(Protocol):
    """What torch.distributed.checkpoint calls a `Stateful`, with tensors only."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The state at the last step boundary."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of a checkpoint."""
        ...


Parts: TypeAlias = Mapping[str, Part]


def streams_key(virtual_rank: int) -> str:
    """The name of the part that holds a virtual rank's random streams."""
    return f"rng.vrank{virtual_rank}"


def size_bytes(parts: Parts) -> int:
    """How large a checkpoint of these parts is, over all ranks; streams of other ranks aside."""
    tensors = [tensor for part in parts.values() for tensor in part.state_dict().values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class ModelPart:
    """The weights. A tied tensor is listed once, under its first name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live parameters and persistent buffers, by qualified name."""
        persistent = self._model.state_dict(keep_vars=True)
        # named_parameters skips aliases; buffers that are not persistent are not in state_dict.
        tensors = dict(self._model.named_parameters())
        buffers = {n: b for n, b in self._model.named_buffers() if n in persistent}
        return {name: tensor.detach() for name, tensor in (tensors | buffers).items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights in place; ties survive, since no tensor is replaced."""
        _copy_all(self.state_dict(), state)


class OptimizerPart:
    """Both moments and the step count of every parameter, under the parameter's name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._named = [(name, optimizer.state[p]) for name, p in model.named_parameters()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The live tensors as `<parameter>.<state>`."""
        return {
            f"{name}.{key}": tensor for name, state in self._named for key, tensor in state.items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the state in place."""
        _copy_all(self.state_dict(), state)


class SchedulerPart:
    """Where the learning rate schedule stands."""

    def __init__(self, scheduler: LambdaLR) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Finished scheduler steps (int64) and the current rates (float64, one a group)."""
        return {
            "finished": torch.tensor(self._scheduler.last_epoch),
            "lr": torch.tensor(self._scheduler.get_last_lr(), dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the schedule and the rates that the optimizer uses."""
        rates = state["lr"].tolist()
        finished = int(state["finished"].item())
        self._scheduler.last_epoch = finished
        self._scheduler._step_count = finished + 1
        self._scheduler._last_lr = rates
        groups = self._scheduler.optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _copy_all(targets: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    if targets.keys() != state.keys():
        raise KeyError(f"state does not fit: {sorted(targets.keys() ^ state.keys())}")
    with torch.no_grad():
        for name, target in targets.items():
            if target is not state[name]:
                target.copy_(state[name])
