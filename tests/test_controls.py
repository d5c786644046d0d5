"""Negative controls: forget to restore one thing, and the proof notices, for the right reason.

A control is believed only because the same harness without it passes (`test_equivalence.py`) and
because it fails where its part is first used, not somewhere by chance.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kettle.evidence.checks import verify
from kettle.evidence.timeline import attempts_of
from kettle.train.run import Run
from support.attempts import StopAt, Told, alone, compared, forgetting, interrupted
from support.experiments import (
    draw_from_all,
    draw_from_numpy,
    draw_from_python,
    draw_from_torch,
    noise,
    tiny,
)

if TYPE_CHECKING:
    import torch

RESUMED_FROM = 4
PARTS = ["model", "optimizer", "scheduler", "loader", "progress", "rng.vrank0", "rng.vrank1"]

ResumedWithout = Callable[..., Told]

FIELDS = ("sample_digest", "lr", "loss", "grad_norm")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return alone(tiny(tmp_path_factory.mktemp("reference")), noise(transform=draw_from_all))


@pytest.fixture(scope="module")
def resumed_without(tmp_path_factory: pytest.TempPathFactory) -> ResumedWithout:
    """Interrupt after step 4, resume without restoring some parts; records and checkpoint."""

    def run(*parts: str) -> Told:
        _, second = interrupted(
            tiny(tmp_path_factory.mktemp("trial")),
            noise(transform=draw_from_all),
            stops=[StopAt(RESUMED_FROM + 1)],
            change=forgetting(*parts),
        )
        return second

    return run


def differing_fields(reference: Told, trial: Told) -> list[set[str]]:
    """For each step of the trial, which fields of its record are not the reference's."""
    by_step = {s.step: s for s in reference.steps}
    return [
        {f for f in FIELDS if getattr(s, f) != getattr(by_step[s.step], f)} for s in trial.steps
    ]


def test_every_part_has_a_control(tmp_path: Path) -> None:
    names: list[str] = []

    def look(run: Run) -> Run:
        names.extend(run.parts)
        return run

    alone(tiny(tmp_path), noise(), stop=StopAt(1), change=look)
    assert names == PARTS


@pytest.mark.parametrize("part", PARTS)
def test_control_skipping_any_part_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout, part: str
) -> None:
    trial = resumed_without(part)
    assert trial.resumed_from == RESUMED_FROM
    assert not compared(reference, trial).identical


def test_control_skipping_model_restore_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout
) -> None:
    trial = resumed_without("model")
    assert differing_fields(reference, trial)[0] == {"loss", "grad_norm"}
    # Fresh weights know nothing: the loss is back where an untrained model's is.
    assert trial.steps[0].loss > reference.steps[RESUMED_FROM].loss


def test_control_skipping_optimizer_restore_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout
) -> None:
    first, second, *_ = differing_fields(reference, resumed_without("optimizer"))
    assert first == set()  # the first step's gradients don't depend on the moments
    assert second == {"loss", "grad_norm"}


def test_control_skipping_scheduler_restore_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout
) -> None:
    first, second, *_ = differing_fields(reference, resumed_without("scheduler"))
    assert first == {"lr"}
    assert second == {"lr", "loss", "grad_norm"}


def test_control_skipping_dataloader_restore_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout
) -> None:
    trial = resumed_without("loader")
    assert "sample_digest" in differing_fields(reference, trial)[0]
    assert trial.steps[0].sample_digest == reference.steps[0].sample_digest  # the data starts over


def test_control_skipping_progress_restore_replays_steps(
    reference: Told, resumed_without: ResumedWithout
) -> None:
    trial = resumed_without("progress")
    assert trial.steps[0].step == 1
    verdict = verify(attempts_of(trial.records))
    assert not verdict.verdict
    assert not compared(reference, trial).identical


@pytest.mark.parametrize("virtual_rank", [0, 1])
def test_control_skipping_rng_restore_breaks_equivalence(
    reference: Told, resumed_without: ResumedWithout, virtual_rank: int
) -> None:
    trial = resumed_without(f"rng.vrank{virtual_rank}")
    # The same samples at the same rate, but other dropout masks and other replaced tokens.
    assert differing_fields(reference, trial)[0] == {"loss", "grad_norm"}


STREAMS = {
    "python": (draw_from_python, ["python", "python_gauss"]),
    "numpy": (draw_from_numpy, ["numpy", "numpy_gauss"]),
    "torch": (draw_from_torch, ["torch_cpu"]),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_control_skipping_rng_restore_of_one_stream_breaks_equivalence(
    tmp_path: Path, stream: str
) -> None:
    transform, keys = STREAMS[stream]
    options = {"experiment__model__attention_dropout": 0.0}  # so that only the transform draws
    reference = alone(tiny(tmp_path / "reference", **options), noise(transform=transform))
    _, trial = interrupted(
        tiny(tmp_path / "trial", **options),
        noise(transform=transform),
        stops=[StopAt(RESUMED_FROM + 1)],
        change=forgetting("rng.vrank0", "rng.vrank1", keys=keys),
    )
    assert differing_fields(reference, trial)[0] == {"loss", "grad_norm"}


@pytest.mark.parametrize("stream", STREAMS)
def test_stream_that_nothing_draws_from_is_untestable(tmp_path: Path, stream: str) -> None:
    """The control of the control above: it is the drawing that makes it break."""
    _, keys = STREAMS[stream]
    options = {"experiment__model__attention_dropout": 0.0}
    reference = alone(tiny(tmp_path / "reference", **options), noise())
    _, trial = interrupted(
        tiny(tmp_path / "trial", **options),
        noise(),
        stops=[StopAt(RESUMED_FROM + 1)],
        change=forgetting("rng.vrank0", "rng.vrank1", keys=keys),
    )
    assert all(not fields for fields in differing_fields(reference, trial))


def test_control_swapping_two_virtual_ranks_streams_breaks_equivalence(
    tmp_path: Path, reference: Told
) -> None:
    def swapped(run: Run) -> Run:
        zero, one = run.parts["rng.vrank0"], run.parts["rng.vrank1"]
        parts = {**run.parts, "rng.vrank0": one, "rng.vrank1": zero}
        return dataclasses.replace(run, parts=parts)

    _, trial = interrupted(
        tiny(tmp_path),
        noise(transform=draw_from_all),
        stops=[StopAt(RESUMED_FROM + 1)],
        change=swapped,
    )
    assert differing_fields(reference, trial)[0] == {"loss", "grad_norm"}


def test_forward_pass_advances_the_rng(tmp_path: Path) -> None:
    """Without this the RNG controls would prove nothing about the model itself."""
    before: list[torch.Tensor] = []
    after: list[Run] = []

    def keep(run: Run) -> Run:
        before.append(run.parts["rng.vrank0"].state_dict()["torch_cpu"])
        after.append(run)
        return run

    alone(tiny(tmp_path), noise(), stop=StopAt(2), change=keep)
    assert not after[0].parts["rng.vrank0"].state_dict()["torch_cpu"].equal(before[0])
