"""Break one thing in a resume, and `kettle diff` names it from the records alone."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kettle.evidence.diff import diff
from kettle.records import Step
from kettle.state.parts import Part
from kettle.train.run import Run
from support.attempts import Change, StopAt, Told, alone, attempt, forgetting, interrupted
from support.experiments import NoiseRows, draw_from_all, noise, tiny
from support.ranks import Ranks, on_ranks

# Nearly all of them train, on a process group of one rank.
pytestmark = pytest.mark.dist

DATA = noise(transform=draw_from_all)
RESUMED_FROM = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return alone(tiny(tmp_path_factory.mktemp("reference"), runtime__digest_every=1), DATA)


def resumed(root: Path, change: Change) -> Told:
    config = tiny(root, runtime__digest_every=1)
    first, second = interrupted(config, DATA, stops=[StopAt(RESUMED_FROM + 1)], change=change)
    return Told(records=first.records + second.records, exit_code=second.exit_code)


@dataclasses.dataclass
class Altered:
    """A part that is restored as something else."""

    part: Part
    alter: Any

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.part.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.part.load_state_dict(self.alter(dict(state)))


def altering(name: str, alter: Any) -> Change:
    def change(run: Run) -> Run:
        return dataclasses.replace(run, parts={**run.parts, name: Altered(run.parts[name], alter)})

    return change


def swapping_random_streams(run: Run) -> Run:
    """Each of two virtual ranks gets what the other one should have."""
    one, other = run.parts["rng.vrank0"], run.parts["rng.vrank1"]
    held: dict[str, Any] = {}

    def first(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        held["state"] = {key: tensor.clone() for key, tensor in state.items()}
        return state

    def second(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        one.load_state_dict(state)
        return held["state"]  # type: ignore[no-any-return]

    parts = {"rng.vrank0": Altered(one, first), "rng.vrank1": Altered(other, second)}
    return dataclasses.replace(run, parts={**run.parts, **parts})


def shifted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "sample_index": state["sample_index"] + 1}


def stepped_twice(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "lr": state["lr"] * 0.5}


def reseeded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "torch_cpu": torch.Generator().manual_seed(1).get_state()}


def without_step_count(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: torch.zeros_like(v) if k.endswith(".step") else v for k, v in state.items()}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (forgetting("model"), "state"),
        (forgetting("optimizer"), "optimizer"),
        (forgetting("scheduler"), "schedule"),
        (forgetting("loader"), "data"),
        (forgetting("rng.vrank1"), "rng"),
        (swapping_random_streams, "rng"),
        (altering("rng.vrank0", reseeded), "rng"),
        (altering("loader", shifted), "data"),
        (altering("scheduler", stepped_twice), "schedule"),
        (altering("optimizer", without_step_count), "optimizer"),
    ],
    ids=[
        "model",
        "optimizer",
        "scheduler",
        "loader",
        "rng",
        "swapped rng",
        "reseeded",
        "shifted loader",
        "scheduler stepped twice",
        "step counter",
    ],
)
def test_diff_names_what_was_broken(
    reference: Told, tmp_path: Path, change: Change, kind: str
) -> None:
    found = diff(reference.records, resumed(tmp_path, change).records)
    assert found.difference is not None
    assert (found.difference.step, found.kind) == (RESUMED_FROM + 1, kind)


def test_diff_of_a_sound_resume_finds_nothing(reference: Told, tmp_path: Path) -> None:
    found = diff(reference.records, resumed(tmp_path, lambda run: run).records)
    assert found.same
    assert found.weights_compared_at == tuple(range(1, 10))


@dataclasses.dataclass(frozen=True)
class OneRowChanged(NoiseRows):
    row: int = 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "labels": sample["labels"][::-1].copy()} if index == self.row else sample


def test_changed_row_is_found_where_it_is_first_consumed(reference: Told, tmp_path: Path) -> None:
    data = dataclasses.replace(DATA, samples=OneRowChanged(29, row=7))
    found = diff(reference.records, alone(tiny(tmp_path), data).records)
    assert found.kind == "state"
    assert "what a sample holds" in found.sentence


def run_on(ranks: Ranks, root: Path) -> list[tuple[str | None, str | None]]:
    config = tiny(root / str(ranks.world_size), runtime__digest_every=3)
    told = attempt(config, DATA, ranks=ranks)
    return [(step.rng_digest, step.weights_digest) for step in told.of(Step)]


def test_digests_of_the_record_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    one, two = (on_ranks(w, run_on, tmp_path)[0] for w in (1, 2))
    assert one == two
    assert [weights is not None for _, weights in one] == [False, False, True] * 3
