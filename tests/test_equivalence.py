"""An interrupted run ends bit for bit where the uninterrupted one ends."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from kettle.errors import StepError
from kettle.exits import ExitCode
from kettle.records import CheckpointCommitted, Preemption, RunCompleted, StopDecided
from kettle.train.run import Run
from support.attempts import Change, StopAt, Told, alone, compared, forgetting, interrupted
from support.experiments import draw_from_all, noise, tiny

TOTAL_STEPS = 9


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return alone(tiny(tmp_path_factory.mktemp("reference")), noise(transform=draw_from_all))


def losses(told: Told) -> list[tuple[float, ...]]:
    return [(s.step, s.loss, s.grad_norm, s.lr) for s in told.steps]


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("step", range(1, TOTAL_STEPS + 1))
def test_resumed_run_is_bit_identical_to_the_reference(
    tmp_path: Path, reference: Told, step: int, loader_workers: int
) -> None:
    micro_batch = step % 4  # before a round, inside its accumulation, and in the last round
    config = tiny(tmp_path, runtime__loader_workers=loader_workers)
    dataset = noise(transform=draw_from_all)
    first, second = interrupted(config, dataset, stops=[StopAt(step, micro_batch)])
    assert first.exit_code == ExitCode.PREEMPTED
    assert losses(first) + losses(second) == losses(reference)
    assert compared(reference, second).identical


def test_resume_actually_happened(tmp_path: Path, reference: Told) -> None:
    stop = StopAt(6, 2)
    first, second = interrupted(tiny(tmp_path), noise(transform=draw_from_all), stops=[stop])
    assert second.resumed_from == 5
    assert [s.step for s in first.steps] == [1, 2, 3, 4, 5]
    assert [s.step for s in second.steps] == [6, 7, 8, 9]
    assert second.steps[0].loss != reference.steps[0].loss


def test_batch_after_resume_is_the_references_next_batch(tmp_path: Path, reference: Told) -> None:
    _, second = interrupted(tiny(tmp_path), noise(transform=draw_from_all), stops=[StopAt(5, 3)])
    assert second.steps[0].sample_digest == reference.steps[4].sample_digest
    digests = [s.sample_digest for s in reference.steps]
    assert len(set(digests)) == len(digests)


def test_stop_in_mid_accumulation_loses_no_sample(tmp_path: Path, reference: Told) -> None:
    stops = [StopAt(2, 1), StopAt(5, 2), StopAt(7, 3)]
    attempts = interrupted(tiny(tmp_path), noise(transform=draw_from_all), stops=stops)
    trial = [s.sample_digest for told in attempts for s in told.steps]
    assert trial == [s.sample_digest for s in reference.steps]
    assert compared(reference, attempts[-1]).identical


def test_positions_saved_in_mid_step_would_lose_samples(tmp_path: Path, reference: Told) -> None:
    """The control of the test above: a position that has moved with the loader is noticed."""

    def moved_on(run: Run) -> Run:
        part = run.parts["loader"]

        class Ahead:
            def state_dict(self) -> Mapping[str, torch.Tensor]:
                state = dict(part.state_dict())
                return {**state, "sample_index": state["sample_index"] + 4}

            def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
                part.load_state_dict(state)

        return dataclasses.replace(run, parts={**run.parts, "loader": Ahead()})

    config, dataset = tiny(tmp_path), noise(transform=draw_from_all)
    alone(config, dataset, stop=StopAt(5, 2), change=moved_on)
    second = alone(config, dataset)
    assert second.resumed_from == 4
    assert second.steps[0].sample_digest != reference.steps[4].sample_digest


def test_stop_on_a_committed_step_saves_nothing(tmp_path: Path) -> None:
    config = tiny(tmp_path, checkpoint__every=3)
    told = alone(config, noise(), stop=StopAt(4))
    assert [c.step for c in told.of(CheckpointCommitted)] == [3]
    (preemption,) = told.of(Preemption)
    assert (preemption.outcome, preemption.save_ms) == ("already_saved", None)


def test_stop_before_any_step_has_nothing_to_save(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(1, 3))
    (preemption,) = told.of(Preemption)
    assert (preemption.outcome, preemption.step) == ("nothing_new", 0)
    assert not told.of(CheckpointCommitted)
    assert told.exit_code == ExitCode.PREEMPTED


def test_stop_decision_says_how_many_micro_batches_were_dropped(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(3, 2))
    (decision,) = told.of(StopDecided)
    assert (decision.step, decision.micro_batch) == (2, 2)


def broken_gradient(value: float) -> Change:
    """Make one gradient of step 4 infinite or NaN, while its loss stays finite."""

    def change(run: Run) -> Run:
        norm = run.norm

        def spoiled(gradients: Sequence[torch.Tensor]) -> float:
            if run.progress.step == 3:
                gradients[0][0, 0] = value
            return norm(gradients)

        return dataclasses.replace(run, norm=spoiled)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradient_that_is_not_finite_is_refused_before_it_reaches_the_weights(
    tmp_path: Path, reference: Told, value: float
) -> None:
    config, dataset = tiny(tmp_path, checkpoint__every=1), noise(transform=draw_from_all)
    with pytest.raises(StepError, match=r"step 4 has loss .* and gradient norm (inf|nan)"):
        alone(config, dataset, change=broken_gradient(value))
    resumed = alone(config, dataset)
    assert resumed.resumed_from == 3
    assert compared(reference, resumed).identical


def test_complete_run_takes_no_step_when_started_again(tmp_path: Path, reference: Told) -> None:
    config, dataset = tiny(tmp_path), noise(transform=draw_from_all)
    alone(config, dataset)
    again = alone(config, dataset)
    assert (again.resumed_from, again.steps, again.exit_code) == (TOTAL_STEPS, [], ExitCode.OK)
    (completed,) = again.of(RunCompleted)
    assert completed.weights_digest == reference.of(RunCompleted)[0].weights_digest


def test_eviction_at_every_step_in_one_run_ends_bit_identical(
    tmp_path: Path, reference: Told
) -> None:
    stops = [StopAt(step, step % 4) for step in range(1, TOTAL_STEPS + 1)]
    attempts = interrupted(tiny(tmp_path), noise(transform=draw_from_all), stops=stops)
    assert compared(reference, attempts[-1]).identical


def test_harness_that_wraps_without_forgetting_changes_nothing(
    tmp_path: Path, reference: Told
) -> None:
    _, second = interrupted(
        tiny(tmp_path),
        noise(transform=draw_from_all),
        stops=[StopAt(5)],
        change=forgetting("model", "optimizer", "rng.vrank0", keys=[]),
    )
    assert compared(reference, second).identical
