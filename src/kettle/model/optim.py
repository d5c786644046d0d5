"""AdamW whose bits don't depend on how parameters are sharded, and the learning rate schedule."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from kettle.config import OptimConfig
from kettle.model.shard import local

_BATCH_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Elements updated at a time: what stays in a CPU's cache, what spares a GPU's memory."""


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay Adam (Loshchilov and Hutter, ICLR 2019, algorithm 2).

    Written with multiply, add, divide and square root alone: each is rounded correctly by IEEE
    754, elementwise, so an element's result can't depend on its neighbours. Forms that fuse a
    multiply with an add round differently in a vector's body and in its scalar tail, and where
    the tail lies depends on the shard's size.

    State per parameter: `exp_avg` and `exp_avg_sq`, sharded like it, present from the start; and
    one `step` (float32, 0-d) for bias correction, as in torch.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimConfig) -> None:
        defaults = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                # Made here and not in the first step, so that a restore has something to fill.
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "step": torch.zeros(()),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update from the gradients."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in parameters]
        for state in states:
            state["step"] += 1
        step = states[0]["step"].item()
        scale1 = 1 / (1 - beta1**step)
        scale2 = math.sqrt(1 - beta2**step)

        rows = [
            (local(p), local(p.grad), local(state["exp_avg"]), local(state["exp_avg_sq"]))
            for p, state in zip(parameters, states, strict=True)
            if p.grad is not None
        ]
        for weights, gradients, first, second in batches(rows):
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(first, beta1)
            torch._foreach_add_(first, torch._foreach_mul(gradients, 1 - beta1))
            squares = torch._foreach_mul(gradients, gradients)
            torch._foreach_mul_(squares, 1 - beta2)
            torch._foreach_mul_(second, beta2)
            torch._foreach_add_(second, squares)
            root = torch._foreach_sqrt(second)
            torch._foreach_div_(root, scale2)
            torch._foreach_add_(root, group["eps"])
            update = torch._foreach_div(first, root)
            torch._foreach_mul_(update, -group["lr"] * scale1)
            torch._foreach_add_(weights, update)


def batches(rows: Sequence[tuple[torch.Tensor, ...]]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Rows of tensors of one shape each, cut alike into batches of limited size.

    Elementwise results don't depend on how the tensors are cut; where the intermediate ones fit
    decides the speed.
    """
    batch: list[tuple[torch.Tensor, ...]] = []
    size = 0
    for row in rows:
        limit = _BATCH_ELEMENTS[row[0].device.type]
        fits = row[0].numel() <= limit
        for pieces in [row] if fits else _cut(row, limit):
            if batch and size + pieces[0].numel() > limit:
                yield tuple(map(list, zip(*batch, strict=True)))
                batch, size = [], 0
            batch.append(pieces)
            size += pieces[0].numel()
    if batch:
        yield tuple(map(list, zip(*batch, strict=True)))


def _cut(row: tuple[torch.Tensor, ...], limit: int) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.view(-1).split(limit) for tensor in row), strict=True)


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over all parameters; weight decay on matrices only, not on norms and biases."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], config)


def build_scheduler(optimizer: AdamW, config: OptimConfig, *, total_steps: int) -> LambdaLR:
    """The learning rate as a function of finished steps."""
    return LambdaLR(
        optimizer,
        lambda finished: lr_factor(finished + 1, config=config, total_steps=total_steps),
    )


def lr_factor(step: int, *, config: OptimConfig, total_steps: int) -> float:
    """What the peak rate is multiplied with in a step (counted from 1)."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    falling = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / falling)
    floor = config.min_lr_ratio
    if config.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return floor + (1 - floor) * (1 - progress)
    return 1.0
