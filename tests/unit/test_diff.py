"""kettle diff: the first step that differs, and the part of the state that it makes a suspect."""

import json
from pathlib import Path
from typing import Any

import pytest

from kettle.cli.app import run
from kettle.evidence.diff import diff
from kettle.records import Record
from support.logs import started, step, write_log


def log(*, at: int | None = None, **changes: Any) -> list[Record]:
    """Six steps, with a digest of the weights after the third and the sixth."""
    records = [started("a")]
    for number in range(1, 7):
        weights = f"w{number}" if number % 3 == 0 else None
        record = step("a", number).model_copy(
            update={"rng_digest": f"r{number}", "weights_digest": weights}
        )
        records.append(record.model_copy(update=changes) if number == at else record)
    return records


def test_same_logs_have_no_difference() -> None:
    found = diff(log(), log())
    assert (found.same, found.kind, found.common_steps) == (True, None, 6)
    assert found.weights_compared_at == (3, 6)


@pytest.mark.parametrize(
    ("changes", "kind", "suspect"),
    [
        ({"sample_digest": "x", "loss": 9.0}, "data", "loader's position"),
        ({"lr": 9.0, "grad_norm": 9.0}, "schedule", "schedule's state"),
        ({"rng_digest": "x", "loss": 9.0}, "rng", "random streams"),
        ({"weights_digest": "x"}, "optimizer", "optimizer's state"),
    ],
    ids=["data", "schedule", "rng", "optimizer"],
)
def test_what_differs_first_names_the_suspect(
    changes: dict[str, Any], kind: str, suspect: str
) -> None:
    found = diff(log(), log(at=3, **changes))
    assert found.difference is not None
    assert (found.difference.step, found.kind) == (3, kind)
    assert suspect in found.sentence


@pytest.mark.parametrize(("field", "kind"), [("loss", "state"), ("grad_norm", "gradients")])
def test_loss_or_gradients_that_differ_and_lead_to_other_weights(field: str, kind: str) -> None:
    trial = [
        record.model_copy(update={"weights_digest": "x"}) if record.event == "step" else record
        for record in log(at=2, **{field: 9.0})
    ]
    assert diff(log(), trial).kind == kind


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_loss_that_differs_though_the_weights_agree_afterwards_is_only_reported_otherwise(
    field: str,
) -> None:
    assert diff(log(), log(at=2, **{field: 9.0})).kind == "reporting"


def test_logs_without_digests_are_compared_by_what_they_have() -> None:
    old = [
        record.model_copy(update={"rng_digest": None, "weights_digest": None})
        if record.event == "step"
        else record
        for record in log()
    ]
    assert diff(old, log()).same


def test_command_exits_1_and_names_step_and_suspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "a.jsonl", log())
    write_log(tmp_path / "b.jsonl", log(at=4, rng_digest="x"))
    assert run(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 1
    told = capsys.readouterr().out
    assert "first difference at step 4: rng_digest is x instead of r4" in told
    assert "suspect their restore" in told


def test_command_exits_0_where_nothing_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_log(tmp_path / name, log())
    assert run(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
