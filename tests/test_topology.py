"""The result does not depend on how many ranks computed it."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from kettle.config import RunConfig
from kettle.distributed import Ranks, told_by_first
from kettle.errors import KettleError
from kettle.records import RunCompleted
from kettle.state.rng import VirtualRankStreams, capture, seeded
from kettle.train.run import Run
from support.attempts import Change, StopAt, Told, as_it_is, attempt, compared, never
from support.checkpoints import tensors_of
from support.experiments import draw_from_all, noise, tiny
from support.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

STEPS = 4

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32-accumulation-3": {"accumulation": 3},
    "fp32-accumulation-3-exchange-every-round": {"accumulation": 3, "exchange": "round"},
    "bf16": {"compute_dtype": "bfloat16"},
    "bf16-accumulation-3": {"compute_dtype": "bfloat16", "accumulation": 3},
    "six-virtual-ranks": {"virtual_ranks": 6},
    "six-virtual-ranks-bf16-accumulation-3": {
        "virtual_ranks": 6,
        "compute_dtype": "bfloat16",
        "accumulation": 3,
    },
    "untied": {"tie_embeddings": False},
}


def config_of(root: Path, case: dict[str, Any], **more: Any) -> RunConfig:
    options = {
        "experiment__total_steps": STEPS,
        "experiment__virtual_ranks": case.get("virtual_ranks", 4),
        "experiment__accumulation": case.get("accumulation", 1),
        "experiment__compute_dtype": case.get("compute_dtype", "float32"),
        "experiment__micro_batch": 1,
        "experiment__model__tie_embeddings": case.get("tie_embeddings", True),
        "runtime__exchange": case.get("exchange", "auto"),
        **more,
    }
    return tiny(root, **options)


def run_cases(ranks: Ranks, root: Path) -> dict[str, Told]:
    return {
        name: attempt(config_of(root / name, case), noise(transform=draw_from_all), ranks=ranks)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Told]]:
    """Every case on 1, 2, 3 and 4 ranks; rank 0's word for each."""
    root = tmp_path_factory.mktemp("topology")
    return {w: on_ranks(w, run_cases, root / str(w))[0] for w in (1, 2, 3, 4)}


def numbers(told: Told) -> list[tuple[Any, ...]]:
    return [(s.step, s.loss, s.grad_norm, s.lr, s.tokens, s.sample_digest) for s in told.steps]


def first_difference(one: Told, other: Told) -> tuple[int, set[str]]:
    """The first step whose records differ, and in what."""
    fields = ("sample_digest", "tokens", "lr", "loss", "grad_norm")
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        differing = {name for name in fields if getattr(ours, name) != getattr(theirs, name)}
        if differing:
            return ours.step, differing
    raise AssertionError("no step differs")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_weights_do_not_depend_on_the_number_of_ranks(
    results: dict[int, dict[str, Told]], case: str, world_size: int
) -> None:
    one, several = results[1][case], results[world_size][case]
    assert numbers(several) == numbers(one)
    assert several.of(RunCompleted)[0].weights_digest == one.of(RunCompleted)[0].weights_digest
    # Weights, moments, schedule, positions and every virtual rank's streams.
    assert compared(one, several).identical


def test_both_exchange_schedules_give_the_same_bits(results: dict[int, dict[str, Told]]) -> None:
    for told in results.values():
        each_step = told["fp32-accumulation-3"]
        each_round = told["fp32-accumulation-3-exchange-every-round"]
        assert numbers(each_round) == numbers(each_step)


# Controls: each takes one canonical piece out, and the number of ranks shows.


def stock_clip(run: Run) -> Run:
    def norm(_gradients: object) -> float:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        return float(total.full_tensor())  # type: ignore[attr-defined]

    return dataclasses.replace(run, norm=norm)  # type: ignore[arg-type]


def streams_by_rank(run: Run) -> Run:
    device = run.ranks.device
    states = {
        v: seeded(run.config.experiment.seed, virtual_rank=run.ranks.rank, device=device)
        for v in run.hosting.hosted_by(run.ranks.rank)
    }
    return dataclasses.replace(run, streams=VirtualRankStreams(states, device=device))


def fused_adamw(run: Run) -> Run:
    groups = [
        {"params": g["params"], "weight_decay": g["weight_decay"]}
        for g in run.optimizer.param_groups
    ]
    optim = run.config.experiment.optim
    fused = torch.optim.AdamW(groups, lr=optim.lr, eps=optim.eps, fused=True)
    scheduler = LambdaLR(fused, run.scheduler.lr_lambdas[0])
    parts = {k: p for k, p in run.parts.items() if k not in {"optimizer", "scheduler"}}
    return dataclasses.replace(run, optimizer=fused, scheduler=scheduler, parts=parts)  # type: ignore[arg-type]


CONTROLS: dict[str, tuple[Change, dict[str, Any]]] = {
    "nothing": (as_it_is, {}),
    "stock clip": (stock_clip, {}),
    "stock reduce-scatter": (as_it_is, {"experiment__reduction": "native"}),
    "streams keyed by rank": (streams_by_rank, {}),
    "fused AdamW": (fused_adamw, {}),
}


def run_controls(ranks: Ranks, root: Path) -> dict[str, Told]:
    told = {}
    for name, (change, options) in CONTROLS.items():
        config = config_of(root / name.replace(" ", "-"), {}, experiment__total_steps=9, **options)
        told[name] = attempt(config, noise(), ranks=ranks, change=change)
    return told


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Told]]:
    root = tmp_path_factory.mktemp("controls")
    return {w: on_ranks(w, run_controls, root / str(w))[0] for w in (1, 3)}


@pytest.mark.parametrize("control", [name for name in CONTROLS if name != "nothing"])
def test_control_without_a_canonical_piece_depends_on_the_number_of_ranks(
    controls: dict[int, dict[str, Told]], control: str
) -> None:
    one, three = controls[1][control], controls[3][control]
    assert one.of(RunCompleted)[0].weights_digest != three.of(RunCompleted)[0].weights_digest


def test_control_that_takes_nothing_out_does_not_depend_on_the_number_of_ranks(
    controls: dict[int, dict[str, Told]],
) -> None:
    assert numbers(controls[1]["nothing"]) == numbers(controls[3]["nothing"])


def test_control_stock_reduce_scatter_differs_in_the_gradients_of_the_first_step(
    controls: dict[int, dict[str, Told]],
) -> None:
    one, three = (controls[w]["stock reduce-scatter"].steps[0] for w in (1, 3))
    assert one.loss == three.loss
    assert one.grad_norm != three.grad_norm


def test_control_fused_adamw_differs_after_a_step_that_did_not(
    controls: dict[int, dict[str, Told]],
) -> None:
    step, differing = first_difference(*(controls[w]["fused AdamW"] for w in (1, 3)))
    assert step > 1  # gradients are canonical; only what the update made of them is not
    assert differing <= {"loss", "grad_norm"}


def test_control_stock_clip_differs_in_the_norm_before_anything_else(
    controls: dict[int, dict[str, Told]],
) -> None:
    # In float32, which step is the first to round differently depends on the processor.
    _, differing = first_difference(*(controls[w]["stock clip"] for w in (1, 3)))
    assert differing == {"grad_norm"}


def test_control_streams_keyed_by_rank_differ_in_the_loss_of_the_first_step(
    controls: dict[int, dict[str, Told]],
) -> None:
    one, three = (controls[w]["streams keyed by rank"].steps[0] for w in (1, 3))
    assert one.sample_digest == three.sample_digest
    assert one.loss != three.loss


def test_control_another_number_of_threads_differs_in_the_gradients_of_the_first_step(
    tmp_path: Path,
) -> None:
    # Which is why experiment.threads is part of the fingerprint. Only tensors beyond a certain size
    # are split between threads: 91 samples of 11 tokens and width 87 are, and SiLU shows it.
    def told(threads: int) -> Told:
        config = config_of(
            tmp_path / str(threads),
            {"virtual_ranks": 1},
            experiment__threads=threads,
            experiment__micro_batch=91,
        )
        return on_ranks(1, attempt_on, config, 0)[0]  # type: ignore[no-any-return]

    step, differing = first_difference(told(1), told(2))
    assert step == 1
    # A loss is a mean, in which a difference may round away; the norm of the gradients shows it.
    assert {"grad_norm"} <= differing <= {"loss", "grad_norm"}


def attempt_on(ranks: Ranks, config: RunConfig, stop_step: int, change: Change = as_it_is) -> Told:
    stop = StopAt(stop_step) if stop_step else never
    name = f"{ranks.world_size}-until-{stop_step}"
    return attempt(config, noise(100), ranks=ranks, name=name, stop=stop, change=change)


def test_run_that_shrinks_and_grows_ends_bit_identical(tmp_path: Path) -> None:
    case = {"accumulation": 2}
    fixed = config_of(tmp_path / "fixed", case, experiment__total_steps=11)
    reference = on_ranks(4, attempt_on, fixed, 0)[0]
    elastic = config_of(tmp_path / "elastic", case, experiment__total_steps=11)
    attempts = [
        on_ranks(width, attempt_on, elastic, stop)[0]
        for width, stop in [(4, 3), (2, 5), (1, 8), (3, 10), (4, 0)]
    ]
    assert [told.resumed_from for told in attempts] == [None, 2, 4, 7, 9]
    assert [n for told in attempts for n in numbers(told)] == numbers(reference)
    assert compared(reference, attempts[-1]).identical


def test_two_ranks_over_gloo_are_bit_identical_across_an_interruption(tmp_path: Path) -> None:
    reference = on_ranks(2, attempt_on, config_of(tmp_path / "reference", {}), 0)[0]
    trial = config_of(tmp_path / "trial", {})
    on_ranks(2, attempt_on, trial, 3)
    resumed = on_ranks(2, attempt_on, trial, 0)[0]
    assert resumed.resumed_from == 2
    assert compared(reference, resumed).identical


def only_rank_one_is_asked(ranks: Ranks, config: RunConfig) -> Told:
    stop = StopAt(3, 1) if ranks.rank == 1 else never
    return attempt(config, noise(), ranks=ranks, stop=stop)


def test_one_rank_signalled_stops_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"accumulation": 2})
    told = on_ranks(3, only_rank_one_is_asked, config)
    assert [t.exit_code for t in told] == [75, 75, 75]
    assert [t.steps[-1].step for t in told] == [2, 2, 2]


def test_per_virtual_rank_state_is_never_deduplicated(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    told = on_ranks(2, attempt_on, config, 0)[0]
    held = [f"rng.vrank{v}.torch_cpu" for v in range(4)]
    tensors = tensors_of(told.last_checkpoint)
    streams = [tensors[key] for key in held]
    assert len({tuple(stream.tolist()) for stream in streams}) == 4


# Idle ranks: six virtual ranks on four ranks leave two ranks idle in the second round.

SIX = {"virtual_ranks": 6}


def idle_gives_nan(run: Run) -> Run:
    """Mark idle batches by a token of their own, and make the model answer it with NaN."""
    marked = run.batches.idle_batch
    run.batches.idle_batch = lambda: {  # type: ignore[method-assign]
        **marked(),
        "input_ids": torch.full_like(marked()["input_ids"], 256),
        "labels": torch.ones_like(marked()["labels"]),
    }

    def spoil(_module: object, _args: object, kwargs: dict[str, Any], output: Any) -> Any:
        if bool((kwargs["input_ids"] == 256).all()):
            output.logits = output.logits * float("nan")
        return output

    run.model.register_forward_hook(spoil, with_kwargs=True)
    return run


def idle_draws_from_a_virtual_rank(run: Run) -> Run:
    class Careless(VirtualRankStreams):
        @contextmanager
        def of(self, virtual_rank: int | None) -> Any:
            if virtual_rank is not None:
                with super().of(virtual_rank):
                    yield
                return
            yield  # goes on with the streams of the virtual rank that worked here last
            self._moved[run.hosting.hosted_by(run.ranks.rank)[0]] = capture(run.ranks.device)

    streams = Careless(run.streams.boundary, device=run.ranks.device)
    return dataclasses.replace(run, streams=streams)


@pytest.fixture(scope="module")
def six_on_one(tmp_path_factory: pytest.TempPathFactory) -> Told:
    config = config_of(tmp_path_factory.mktemp("six"), SIX)
    return on_ranks(1, attempt_on, config, 0)[0]  # type: ignore[no-any-return]


def test_idle_rank_that_computes_nan_leaves_no_trace(tmp_path: Path, six_on_one: Told) -> None:
    told = on_ranks(4, attempt_on, config_of(tmp_path, SIX), 0, idle_gives_nan)[0]
    assert numbers(told) == numbers(six_on_one)


def test_control_idle_rank_that_draws_from_a_virtual_rank_is_noticed(
    tmp_path: Path, six_on_one: Told
) -> None:
    change = idle_draws_from_a_virtual_rank
    told = on_ranks(4, attempt_on, config_of(tmp_path, SIX), 0, change)[0]
    assert numbers(told)[0] == numbers(six_on_one)[0]  # what it moved is used one step later
    assert numbers(told)[1] != numbers(six_on_one)[1]


# Rank 0 decides alone and tells the others, its failures too.


def rank_zero_fails(ranks: Ranks) -> str:
    def ask() -> str:
        raise ZeroDivisionError("by rank 0")

    try:
        return told_by_first(ask, ranks=ranks)
    except (ZeroDivisionError, KettleError) as error:
        return f"{type(error).__name__}: {error}"


def test_unexpected_error_of_rank_zero_keeps_no_other_rank_waiting() -> None:
    assert on_ranks(2, rank_zero_fails) == [
        "ZeroDivisionError: by rank 0",
        "KettleError: rank 0 says ZeroDivisionError: by rank 0",
    ]
