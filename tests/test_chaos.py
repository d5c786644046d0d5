"""Whole chaos runs with real launchers: the verdict, and what makes it false."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kettle.chaos.drive import conclude
from kettle.chaos.folder import Folder
from kettle.chaos.result import ChaosResult, Plan
from kettle.cli.app import run
from kettle.evidence.compare import compare
from support.checkpoints import rewrite, tensors_of
from support.processes import RUN_FILE, TINY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

OVERRIDES = (*TINY, "experiment.total_steps=20")


def arguments(out: Path, *options: str) -> list[str]:
    sets = [word for override in OVERRIDES for word in ("--set", override)]
    return ["chaos", str(RUN_FILE), "--out", str(out), *options, *sets]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "kettle", *arguments(out, *options)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a chaos run that changed its number of workers and passed."""
    base = tmp_path_factory.getbasetemp()
    # Test processes side by side share the folder above their own, and so this minute's work.
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = folder / "chaos" / "out"
    out.parent.mkdir(exist_ok=True)
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "chaos.json").is_file():
            ended = subprocess.run(
                command(out, "--evictions", "2", "--workers", "2,1", "--json"),
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            assert json.loads(ended.stdout) == json.loads((out / "chaos.json").read_text())
    return out


@pytest.fixture
def result(finished: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((finished / "chaos.json").read_text())
    return document


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Folder:
    """A copy of a finished chaos run, whose records name the copied checkpoints."""
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    for log in out.rglob("*.jsonl"):
        log.write_text(log.read_text().replace(str(finished), str(out)))
    return Folder(out=out)


def plan_of(folder: Folder) -> Plan:
    return Plan.model_validate(json.loads(folder.result.read_text())["plan"])


def judged(folder: Folder) -> ChaosResult:
    return conclude(folder, plan=plan_of(folder), wall_s=0.0)


def nudge_final_checkpoint(side_path: Path) -> None:
    """Move one weight of the final checkpoint by one unit in the last place."""
    (checkpoint,) = side_path.glob("checkpoints/*/step-00000020-*")
    state = tensors_of(checkpoint)
    weight = next(tensor for name, tensor in state.items() if "embed_tokens.weight" in name)
    # The largest, so that the unit is one that a reader of figures can see.
    flat = weight.reshape(-1)
    place = flat.abs().argmax()
    flat[place] = torch.nextafter(flat[place], torch.tensor(float("inf")))
    rewrite(checkpoint, state)


def test_an_evicted_run_whose_workers_change_ends_bit_identical(result: dict[str, Any]) -> None:
    assert result["verdict"] == "bit-identical"
    assert result["passed"] is True
    assert result["floor"] == 0.0
    assert result["comparison"]["tensors"] > 20
    assert result["first_difference"] is None


def test_every_eviction_is_reported_with_what_was_planned(result: dict[str, Any]) -> None:
    assert result["plan"]["points"] == [5, 10]
    assert result["plan"]["workers"] == [2, 1, 2]
    assert [row["planned_step"] for row in result["evictions"]] == [5, 10]
    assert [row["workers"] for row in result["evictions"]] == [2, 1]
    assert [row["exit_code"] for row in result["evictions"]] == [75, 75]
    assert all(row["step"] >= row["planned_step"] for row in result["evictions"])
    assert all(row["save_ms"] > 0 and row["grace_left_s"] > 0 for row in result["evictions"])


def test_the_trial_resumed_where_it_stopped_and_replayed_nothing(result: dict[str, Any]) -> None:
    stops = [row["step"] for row in result["evictions"]]
    assert result["trial"]["resumed_from"] == stops
    assert result["trial"]["step_records"] == result["trial"]["distinct_steps"] == 20
    assert result["trial"]["replayed_steps"] == []


def test_records_and_plots_lie_where_the_documentation_says(finished: Path) -> None:
    for name in (
        *("reference-1/attempt-1.jsonl", "reference-2/attempt-1.jsonl"),
        *("trial/attempt-1.jsonl", "trial/attempt-2.jsonl", "trial/attempt-3.jsonl"),
        *("loss.png", "loss.svg", "chaos.json"),
    ):
        assert (finished / name).stat().st_size > 0


def test_one_ulp_in_a_reference_changes_floor_and_verdict(copied: Folder) -> None:
    assert judged(copied).verdict == "bit-identical"
    nudge_final_checkpoint(copied.references[0].path)
    nudged = judged(copied)
    assert 0 < nudged.floor < 1e-6
    assert nudged.verdict == "within the floor"
    assert not nudged.passed
    assert nudged.comparison.largest_difference == nudged.floor
    assert len(nudged.comparison.differing) == 1
    assert nudged.comparison.differing[0].differing_elements == 1


def test_one_ulp_in_the_trial_breaks_the_verdict(copied: Folder) -> None:
    nudge_final_checkpoint(copied.trial.path)
    nudged = judged(copied)
    assert nudged.floor == 0.0
    assert nudged.verdict == "broken"
    assert not nudged.passed


def test_equal_weights_with_a_step_record_missing_do_not_pass(copied: Folder) -> None:
    log = copied.trial.log(2)
    lines = log.read_text().splitlines(keepends=True)
    step = next(line for line in lines if '"event":"step"' in line.replace(" ", ""))
    log.write_text("".join(line for line in lines if line is not step))
    assert judged(copied).verdict == "bit-identical"
    assert not judged(copied).passed


def test_equal_weights_with_another_loss_on_the_way_do_not_pass(copied: Folder) -> None:
    log = copied.trial.log(2)
    lines = log.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if json.loads(line)["event"] == "step")
    lines[place] = json.dumps(json.loads(lines[place]) | {"loss": 1.0})
    log.write_text("\n".join(lines))
    difference = judged(copied).first_difference
    assert difference is not None
    assert difference.field == "loss"
    assert not judged(copied).passed


def test_the_final_checkpoints_that_are_compared_are_the_runs_own(copied: Folder) -> None:
    comparison = judged(copied).comparison
    assert comparison.reference_uri.startswith(str(copied.references[0].path))
    assert comparison.trial_uri.startswith(str(copied.trial.path))
    assert compare(comparison.reference_uri, comparison.trial_uri).identical


def test_a_folder_that_no_chaos_run_wrote_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert run(arguments(tmp_path, "--evictions", "1")) == 2
    assert "no chaos run wrote it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--evictions", "17"), "largest possible number is 16"),
        (("--evictions", "0"), "at least 1"),
        (("--evictions", "1", "--workers", "2,5"), "from 1 to 4"),
    ],
)
def test_a_plan_that_can_not_be_carried_out_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    assert run(arguments(tmp_path / "out", *options)) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_chaos_run_leaves_no_process(tmp_path: Path, number: int) -> None:
    drive_command = command(tmp_path / "out", "--evictions", "1")
    with subprocess.Popen(drive_command, stderr=subprocess.PIPE, text=True) as drive:
        family: list[psutil.Process] = []
        deadline_s = time.monotonic() + 120
        while len(family) < 3:  # a launcher and two workers
            assert time.monotonic() < deadline_s
            assert drive.poll() is None
            time.sleep(0.05)
            family = psutil.Process(drive.pid).children(recursive=True)
        drive.send_signal(number)
        _, said = drive.communicate(timeout=60)
    assert drive.returncode == 1
    assert "every attempt was stopped" in said
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
