import json
import math
from pathlib import Path

import pytest
import torch

from kettle.cli.app import run
from support.checkpoints import committed
from support.logs import flat, interrupted_run, step, write_log


def checkpoint(folder: Path, *, value: float) -> str:
    return committed(folder, {"model.w": torch.tensor([value])})


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return checkpoint(tmp_path / "reference", value=1.0)


@pytest.fixture
def same(tmp_path: Path) -> str:
    return checkpoint(tmp_path / "same", value=1.0)


@pytest.fixture
def other(tmp_path: Path) -> str:
    return checkpoint(tmp_path / "other", value=1.5)


def test_equal_checkpoints_exit_0(
    reference: str, same: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", reference, same]) == 0
    assert "bit-identical" in capsys.readouterr().out


def test_different_checkpoints_exit_1_and_the_tensor_is_named(
    reference: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", reference, other]) == 1
    assert "model.w: 0.5 (1 of 1 elements)" in capsys.readouterr().out


def test_json_is_one_document(
    reference: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["compare", "--json", reference, other])
    document = json.loads(capsys.readouterr().out)
    assert document["largest_difference"] == 0.5
    assert document["identical"] is False
    assert "first_difference" not in document


def test_an_infinite_difference_is_still_json(
    reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["compare", "--json", reference, checkpoint(tmp_path / "nan", value=math.nan)])
    assert json.loads(capsys.readouterr().out)["largest_difference"] == "Infinity"


def test_another_step_is_told_in_words_and_in_json(
    reference: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for uri, step_of_it in ((reference, 4), (other, 6)):
        marker = Path(uri) / "_COMMIT"
        facts = {**json.loads(marker.read_text()), "run_id": "tiny", "step": step_of_it}
        marker.write_text(json.dumps(facts))
    run(["compare", reference, other])
    assert "the checkpoints are of different steps: 4 and 6" in capsys.readouterr().out
    run(["compare", "--json", reference, other])
    document = json.loads(capsys.readouterr().out)
    assert document["trial"] == {"run_id": "tiny", "step": 6}
    assert (document["same_run"], document["same_step"]) == (True, False)


def test_the_records_name_the_first_step_that_differs(
    reference: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_log(tmp_path / "whole.jsonl", flat(interrupted_run(4)))
    trial = write_log(tmp_path / "trial.jsonl", [step("a", n, lr=0.5) for n in (3, 4)])
    records = ["--records-reference", str(whole), "--records-trial", str(trial)]
    run(["compare", reference, other, *records, "--json"])
    found = json.loads(capsys.readouterr().out)["first_difference"]
    assert (found["step"], found["field"]) == (3, "lr")


def test_equal_weights_after_different_steps_exit_1(
    reference: str, same: str, tmp_path: Path
) -> None:
    whole = write_log(tmp_path / "whole.jsonl", flat(interrupted_run(4)))
    trial = write_log(tmp_path / "trial.jsonl", [step("a", 2, loss=0.5)])
    records = ["--records-reference", str(whole), "--records-trial", str(trial)]
    assert run(["compare", reference, same, *records]) == 1


def test_the_records_of_one_run_alone_are_wrong_usage(
    reference: str, same: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", reference, same, "--records-trial", "x.jsonl"]) == 2
    assert "give both" in capsys.readouterr().err


def test_a_missing_checkpoint_is_wrong_usage(reference: str, tmp_path: Path) -> None:
    assert run(["compare", reference, str(tmp_path / "absent")]) == 2
