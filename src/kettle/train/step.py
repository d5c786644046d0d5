"""One optimizer step, from the data to the new weights. Every rank calls it together."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from kettle.data.loader import IGNORED, MicroBatch
from kettle.data.order import Position, sample_lanes
from kettle.distributed import Ranks, exact_sum
from kettle.errors import StepError
from kettle.model.shard import clear_gradients, local_gradients
from kettle.state.rng import VirtualRankStreams
from kettle.train.run import Run
from kettle.train.stop import StopDecision, agree


@dataclass(frozen=True)
class StepResult:
    """What a finished step reports.

    Attributes:
        loss: mean over the learned tokens of the global batch, in nats.
        tokens: learned tokens of the global batch.
        grad_norm: before clipping.
        lr: the rate that was applied.
        sample_digest: which samples were consumed at which place, 16 hex digits.
        rng_digest: where the random streams stand after the step, 16 hex digits.
    """

    epoch: int
    loss: float
    tokens: int
    grad_norm: float
    lr: float
    sample_digest: str
    rng_digest: str


def take_step(run: Run, step: int) -> StepResult | StopDecision:
    """Take one step, or decide to stop and leave everything as it was before; collective.

    Raises:
        StepError: on all ranks alike, with nothing of the step applied.
    """
    start = run.order.settle(Position(run.position.epoch, run.position.sample_index))
    run.batches.start_step(start)
    sums = _StepSums(run.order.virtual_ranks, device=run.ranks.device)
    decision = _accumulate(run, step, start=start, sums=sums)
    if decision is not None:
        run.reduction.drop_step()
        run.streams.drop_step()
        clear_gradients(run.model)
        return decision

    totals = sums.over_all(run.ranks, streams=run.streams)
    loss, tokens = totals.loss, totals.tokens
    if not tokens:
        raise StepError(f"step {step} has no token to learn from; look at its samples' labels")
    grad_norm = _normalise_and_clip(run, step, loss=loss, tokens=tokens)
    lr = float(run.scheduler.get_last_lr()[0])
    # Until here nothing has changed that a save beside training may still be reading.
    run.store.wait_until_copied()
    run.optimizer.step()
    run.scheduler.step()
    clear_gradients(run.model)

    # The step boundary: only now does anything that a checkpoint holds move on.
    run.streams.finish_step()
    after = run.order.after_step(start)
    run.position.epoch, run.position.sample_index = after.epoch, after.sample_index
    run.progress.step = step
    run.progress.tokens += tokens
    return StepResult(
        epoch=start.epoch,
        loss=loss,
        tokens=tokens,
        grad_norm=grad_norm,
        lr=lr,
        sample_digest=totals.sample_digest,
        rng_digest=totals.rng_digest,
    )


def _accumulate(run: Run, step: int, *, start: Position, sums: "_StepSums") -> StopDecision | None:
    """Every micro-batch of this rank, unless all ranks agree to stop before one; collective."""
    accumulation = run.order.accumulation
    for index, round_ in enumerate(run.hosting.rounds):
        run.reduction.start_round(index)
        virtual_rank = round_.virtual_ranks[run.ranks.rank]
        with run.streams.of(virtual_rank):
            for micro in range(accumulation):
                micro_batch = index * accumulation + micro
                decision = agree(run.stop, step=step, micro_batch=micro_batch, ranks=run.ranks)
                if decision is not None:
                    return decision
                # The last micro-batch hands the virtual rank's leaf to the reduction.
                run.model.set_requires_gradient_sync(micro == accumulation - 1)
                if virtual_rank is None:
                    _backward(run, run.batches.idle_batch())
                    continue
                batch = run.dataset.transform(run.batches.take())
                places = run.order.places(
                    start.sample_index, virtual_rank=virtual_rank, micro=micro
                )
                sums.add(virtual_rank, batch, places=places, loss=_backward(run, batch))
    return None


def _backward(run: Run, batch: MicroBatch) -> torch.Tensor:
    """Forward and backward of one micro-batch; its loss summed over learned tokens, detached."""
    device = run.ranks.device
    input_ids = batch["input_ids"].to(device, non_blocking=True)
    labels = batch["labels"].to(device, non_blocking=True)
    logits = run.model(input_ids=input_ids, use_cache=False).logits
    loss: torch.Tensor = cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _normalise_and_clip(run: Run, step: int, *, loss: float, tokens: int) -> float:
    """Turn summed gradients into those of the clipped mean loss; the norm before clipping.

    Raises:
        StepError: loss or norm are not finite; the gradients are as they were.
    """
    gradients = local_gradients(run.model)
    grad_norm = run.norm(gradients) / tokens
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise StepError(
            f"step {step} has loss {loss} and gradient norm {grad_norm}; nothing of it was "
            "applied, so lower experiment.optim.lr or look at the data, in a run of another name"
        )
    clip = min(1.0, run.config.experiment.optim.max_grad_norm / (grad_norm + 1e-6))
    torch._foreach_mul_(gradients, clip / tokens)
    return grad_norm


@dataclass(frozen=True)
class _Totals:
    """What all ranks together say about a step."""

    loss: float
    tokens: int
    sample_digest: str
    rng_digest: str


class _StepSums:
    """Sums over the global batch that come out the same for every number of ranks."""

    def __init__(self, virtual_ranks: int, *, device: torch.device) -> None:
        self._losses = torch.zeros(virtual_ranks, dtype=torch.float64, device=device)
        self._tokens = 0
        self._lanes = [0, 0]

    def add(
        self, virtual_rank: int, batch: MicroBatch, *, places: range, loss: torch.Tensor
    ) -> None:
        self._losses[virtual_rank] += loss.double()
        self._tokens += int((batch["labels"] != IGNORED).sum())
        for lane, value in enumerate(sample_lanes(places, batch["sample_ids"].numpy())):
            self._lanes[lane] = (self._lanes[lane] + value) % 2**64

    def over_all(self, ranks: Ranks, *, streams: VirtualRankStreams) -> _Totals:
        """Mean loss, learned tokens and digests of the global batch; collective."""
        lanes = [
            lane - 2**64 if lane >= 2**63 else lane for lane in (*self._lanes, *streams.lanes())
        ]
        # Each virtual rank's loss is zero on all ranks but its host, and the bits of 0.0 are 0:
        # summed as integers, the losses travel unchanged.
        losses = self._losses.cpu().view(torch.int64)
        sums = torch.cat([torch.tensor([self._tokens, *lanes]), losses])
        sums = exact_sum(sums, ranks=ranks)
        tokens, *lanes = sums[:5].tolist()
        total = math.fsum(sums[5:].view(torch.float64).tolist())
        return _Totals(
            loss=total / tokens if tokens else math.nan,
            tokens=tokens,
            sample_digest=_digest(lanes[:2]),
            rng_digest=_digest(lanes[2:]),
        )


def _digest(lanes: list[int]) -> str:
    return hashlib.sha256(repr([lane % 2**64 for lane in lanes]).encode()).hexdigest()[:16]
