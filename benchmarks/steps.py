"""What one step costs: kettle's against a bare FSDP2 loop, reductions, and kettle's own extras."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kettle.config import RunConfig
from kettle.data.loader import Dataset, open_dataset
from kettle.distributed import Ranks, barrier, process_group
from kettle.model.build import build_model
from kettle.model.optim import lr_factor
from kettle.records import Record
from kettle.state.digest import weights_digest
from kettle.train.assemble import assemble
from kettle.train.loop import step_record
from kettle.train.run import Run
from kettle.train.step import take_step
from kettle.train.stop import StopDecision, agree, signal_source
from measure import Sample, Samples, interleave

T = TypeVar("T")
Arm = Callable[[], object]

_AT_ONCE = 20
"""Steps whose stop checks, or records, are timed together: alone they are too short."""

PARTS = ("gradient norm", "AdamW", "loader", "random streams", "flight recorder")

KETTLE, BARE, BARE_FUSED = "kettle", "bare", "bare, fused AdamW"


def kettle_and_bare(config: RunConfig, repetitions: int, title: str) -> Samples:
    """Samples of a kettle step, and of one of a bare loop with torch's default and fused AdamW."""

    def arms(ranks: Ranks, dataset: Dataset, sink: TextIO) -> dict[str, Arm]:
        return {
            BARE: bare_steps(config, dataset, ranks=ranks, sink=sink, fused=None),
            KETTLE: kettle_steps(_assembled(config, dataset, ranks=ranks, sink=sink)),
            BARE_FUSED: bare_steps(config, dataset, ranks=ranks, sink=sink, fused=True),
        }

    return _measured(config, arms, repetitions=repetitions, title=title)


def reductions(configs: Mapping[str, RunConfig], repetitions: int, title: str) -> Samples:
    """Samples of kettle steps that differ in nothing but `reduction` and `exchange`."""

    def arms(ranks: Ranks, dataset: Dataset, sink: TextIO) -> dict[str, Arm]:
        return {
            name: kettle_steps(_assembled(config, dataset, ranks=ranks, sink=sink))
            for name, config in configs.items()
        }

    return _measured(next(iter(configs.values())), arms, repetitions=repetitions, title=title)


def extras(config: RunConfig, repetitions: int, title: str) -> Samples:
    """Samples of a step, of the stop checks of one step alone, and of one record alone."""

    def arms(ranks: Ranks, dataset: Dataset, sink: TextIO) -> dict[str, Arm]:
        run = _assembled(config, dataset, ranks=ranks, sink=sink)
        checks = len(run.hosting.rounds) * run.order.accumulation
        result = take_step(run, run.progress.step + 1)
        assert not isinstance(result, StopDecision)

        def stop_checks() -> None:
            for micro_batch in range(checks * _AT_ONCE):
                assert agree(run.stop, step=1, micro_batch=micro_batch, ranks=ranks) is None

        def record() -> None:
            for _ in range(_AT_ONCE):
                run.emit(step_record(run, 1, result, elapsed_s=1.0, weights=None))

        return {"step": kettle_steps(run), "stop checks": stop_checks, "record": record}

    samples = _measured(config, arms, repetitions=repetitions, title=title)
    for name in ("stop checks", "record"):
        samples[name] = [
            Sample(one.wall_s / _AT_ONCE, one.cpu_s / _AT_ONCE) for one in samples[name]
        ]
    return samples


def parts(config: RunConfig, repetitions: int, title: str) -> Samples:
    """Samples of a step and of what is spent inside it on single parts of kettle.

    What the parts leave of the step is forward, backward, FSDP2 and the exchange of gradients.
    """
    samples: Samples = {}

    def arms(ranks: Ranks, dataset: Dataset, sink: TextIO) -> dict[str, Arm]:
        run = _assembled(config, dataset, ranks=ranks, sink=sink)
        clocks = {name: _Clock() for name in PARTS}
        norm, optimizer, loader, streams, recorder = clocks.values()
        update = run.optimizer.step
        run = replace(run, norm=cast("Any", norm.timed(run.norm)))
        warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
        run.optimizer.step = optimizer.timed(update)  # type: ignore[method-assign]
        run.batches.take = loader.timed(run.batches.take)  # type: ignore[method-assign]
        run.streams.of = streams.timed_context(run.streams.of)  # type: ignore[method-assign]
        run.streams.lanes = recorder.timed(run.streams.lanes)  # type: ignore[method-assign]
        step = kettle_steps(run)

        def clocked() -> None:
            for clock in clocks.values():
                clock.spent = Sample(0.0, 0.0)
            step()
            of_weights = _Clock()
            of_weights.timed(weights_digest)(run.parts["model"].state_dict(), ranks=ranks)
            recorder.spent = _shared(
                recorder.spent, of_weights.spent, steps=config.runtime.digest_every
            )
            for name, clock in clocks.items():
                samples.setdefault(name, []).append(clock.spent)

        return {"step": clocked}

    whole = _measured(config, arms, repetitions=repetitions, title=title)
    return whole | {name: spent[-repetitions:] for name, spent in samples.items()}


def _shared(each_step: Sample, once: Sample, *, steps: int) -> Sample:
    """What a step pays where something is done in each and something else once in so many."""
    return Sample(each_step.wall_s + once.wall_s / steps, each_step.cpu_s + once.cpu_s / steps)


class _Clock:
    """Adds up what is spent in what it wraps."""

    def __init__(self) -> None:
        self.spent = Sample(0.0, 0.0)

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: object, **kwargs: object) -> T:
            with self._running():
                return function(*args, **kwargs)

        return call

    def timed_context(
        self, context: Callable[..., AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Times entering and leaving, not what happens inside."""

        @contextmanager
        def call(*args: object) -> Iterator[None]:
            with ExitStack() as stack:
                with self._running():
                    stack.enter_context(context(*args))
                yield
                with self._running():
                    stack.close()

        return call

    @contextmanager
    def _running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.spent = Sample(
            self.spent.wall_s + time.perf_counter() - wall,
            self.spent.cpu_s + time.process_time() - cpu,
        )


def kettle_steps(run: Run) -> Arm:
    """One more step of a run, with its record, as the loop takes it."""

    def step() -> None:
        torch.use_deterministic_algorithms(mode=True)
        number = run.progress.step + 1
        started = time.monotonic()
        result = take_step(run, number)
        assert not isinstance(result, StopDecision)
        elapsed_s = time.monotonic() - started
        run.emit(step_record(run, number, result, elapsed_s=elapsed_s, weights=None))
        assert run.schedule.due(number) is None

    return step


def bare_steps(
    config: RunConfig, dataset: Dataset, *, ranks: Ranks, sink: TextIO, fused: bool | None
) -> Arm:
    """One more step of the loop that one would write with torch alone: same model, same batches.

    It is not deterministic, agrees on nothing, keeps no positions, and exchanges gradients once a
    step, after all micro-batches of a rank.
    """
    experiment = config.experiment
    model = build_model(experiment.model, seed=experiment.seed).to(ranks.device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    optim = experiment.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, fused=fused
    )
    total_steps = experiment.total_steps
    scheduler = LambdaLR(
        optimizer, lambda done: lr_factor(done + 1, config=optim, total_steps=total_steps)
    )
    sampler: DistributedSampler[object] = DistributedSampler(
        dataset.samples,  # type: ignore[arg-type]
        num_replicas=ranks.world_size,
        rank=ranks.rank,
        drop_last=True,
    )
    loader = StatefulDataLoader(
        dataset.samples, batch_size=experiment.micro_batch, sampler=sampler, drop_last=True
    )
    micro_batches = experiment.virtual_ranks * experiment.accumulation // ranks.world_size
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        torch.use_deterministic_algorithms(mode=False)
        total = torch.zeros(())
        for micro in range(micro_batches):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
            (loss / micro_batches).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        line = {"loss": total.item() / micro_batches, "grad_norm": norm.item()}
        if ranks.is_first:
            sink.write(json.dumps(line) + "\n")
            sink.flush()

    return step


def _assembled(config: RunConfig, dataset: Dataset, *, ranks: Ranks, sink: TextIO) -> Run:
    def emit(record: Record) -> None:
        if ranks.is_first:
            sink.write(record.model_dump_json() + "\n")
            sink.flush()

    return assemble(
        config,
        dataset,
        ranks=ranks,
        attempt_id="bench",
        stop=signal_source(None),
        emit=emit,
        grace_s=config.runtime.grace_seconds,
    )


def _measured(
    config: RunConfig,
    arms: Callable[[Ranks, Dataset, TextIO], dict[str, Arm]],
    *,
    repetitions: int,
    title: str,
) -> Samples:
    # torchdata 0.11 calls a function that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    torch.set_num_threads(config.experiment.threads)
    dataset = open_dataset(config.experiment.data, path=config.runtime.data_path)
    with (
        process_group("cpu", timeout_s=300) as ranks,
        Path(os.devnull).open("w", encoding="utf-8") as sink,
    ):
        return interleave(
            arms(ranks, dataset, sink),
            repetitions=repetitions,
            warmup=2,
            meet=lambda: barrier(ranks),
            title=title if ranks.is_first else None,
        )
