import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kettle.checkpoint.layout import MARKER
from kettle.checkpoint.log import read_tail
from kettle.checkpoint.protocol import (
    candidates,
    first_that_loads,
    set_aside_if_stuck,
    settle,
)
from kettle.cli.app import run
from kettle.config import load
from kettle.data.identify import identify
from kettle.errors import NoCheckpointError
from support.checkpoints import committed
from support.saved import SHARD, SavedRun

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples" / "stdlib.toml"


@pytest.fixture
def saved(tmp_path: Path) -> SavedRun:
    """Generation 1 has saved steps 2 and 4."""
    made = SavedRun(tmp_path / "root" / "tiny-0123")
    made.save(2)
    made.save(4)
    return made


def listed(target: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["checkpoints", "list", target, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def verdicts(target: str, capsys: pytest.CaptureFixture[str]) -> dict[int, tuple[str, str | None]]:
    found = listed(target, capsys)["checkpoints"]
    return {seen["step"]: (seen["verdict"], seen["reason"]) for seen in found}


def test_the_newest_checkpoint_is_listed_first(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [seen["step"] for seen in listed(saved.uri, capsys)["checkpoints"]] == [4, 2]


def test_a_line_of_the_list_says_who_saved_what(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["checkpoints", "list", saved.uri])
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split()[:3] == ["4", "1", "first"]
    assert line.split()[5:] == [
        *("1970-01-01", "00:00:00Z", "12"),
        *("step-00000004-g0001-first", "committed"),
    ]


def test_the_line_above_says_who_holds_the_run_and_what_comes_next(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.begin("second")
    run(["checkpoints", "list", saved.uri])
    assert capsys.readouterr().out.splitlines()[0] == (
        "run: generation 2 (attempt second) is the newest; "
        "the next attempt resumes from step 4 (step-00000004-g0001-first)"
    )


def test_both_writers_of_one_step_are_named(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.begin("second")
    saved.save(4)
    found = listed(saved.uri, capsys)["checkpoints"]
    assert [(seen["attempt_id"], seen["generation"]) for seen in found if seen["step"] == 4] == [
        ("second", 2),
        ("first", 1),
    ]


def test_a_checkpoint_whose_object_is_cut_off_is_torn(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.path(saved.save(6)) / SHARD).write_bytes(b"weights")
    reason = f"{SHARD} has 7 bytes and should have 20"
    assert verdicts(saved.uri, capsys)[6] == ("torn", reason)


def test_a_torn_checkpoint_is_not_what_the_next_attempt_resumes_from(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.path(saved.save(6)) / SHARD).unlink()
    assert listed(saved.uri, capsys)["resumes_from"]["step"] == 4


def test_a_proven_checkpoint_whose_folder_is_gone_is_torn(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.find_damaged("step-00000004-g0001-first", restored="step-00000003-g0001-first")
    assert verdicts(saved.uri, capsys)[3] == ("torn", "it was committed, and its marker is missing")


def test_a_save_that_never_ended_is_uncommitted(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.write(6)
    saved.begin("second")
    assert verdicts(saved.uri, capsys)[6] == ("uncommitted", "a save that never ended")


def test_what_the_newest_attempt_may_be_writing_is_called_so(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.write(6)
    reason = "the newest attempt is writing it, or has died"
    assert verdicts(saved.uri, capsys)[6] == ("uncommitted", reason)


def test_a_granted_checkpoint_without_its_marker_counts_as_committed(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.path(saved.save(6)) / MARKER).unlink()
    reason = "granted by the log; the next attempt writes its marker"
    assert verdicts(saved.uri, capsys)[6] == ("committed", reason)


def test_a_quarantined_checkpoint_says_why(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.quarantine("step-00000004-g0001-first", "three crashes")
    assert verdicts(saved.uri, capsys)[4] == ("quarantined", "three crashes")


def test_a_damaged_checkpoint_says_what_an_attempt_has_found(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.find_damaged("step-00000004-g0001-first", restored="step-00000002-g0001-first")
    assert verdicts(saved.uri, capsys)[4] == ("damaged", "it has other bytes")


def test_what_was_before_from_scratch_is_left_behind(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.begin("second", begin="scratch")
    assert {verdict for verdict, _ in verdicts(saved.uri, capsys).values()} == {"left behind"}


def test_after_from_scratch_the_next_attempt_begins_at_step_0(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.begin("second", begin="scratch")
    run(["checkpoints", "list", saved.uri])
    assert capsys.readouterr().out.splitlines()[0].endswith("; the next attempt begins at step 0")


def test_a_run_that_lost_all_checkpoints_is_said_to_end_with_an_error(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in saved.folders:
        (saved.path(name) / SHARD).unlink()
    refusal = listed(saved.uri, capsys)["resumes_from"]["refusal"]
    assert refusal == "the run has committed checkpoints, and none of them can be used"


def test_crashes_in_a_row_send_the_next_attempt_to_an_older_checkpoint(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.fail(step=5, times=3)
    assert listed(saved.uri, capsys)["resumes_from"]["step"] == 2


def as_it_is(_saved: SavedRun) -> None:
    return


def torn(saved: SavedRun) -> None:
    (saved.path(saved.save(6)) / SHARD).unlink()


def granted(saved: SavedRun) -> None:
    (saved.path(saved.save(6)) / MARKER).unlink()


def fallen_back(saved: SavedRun) -> None:
    saved.find_damaged("step-00000004-g0001-first", restored="step-00000002-g0001-first")


def set_aside(saved: SavedRun) -> None:
    saved.quarantine("step-00000004-g0001-first")


def stuck(saved: SavedRun) -> None:
    saved.fail(step=5, times=3)


def stuck_again(saved: SavedRun) -> None:
    saved.quarantine("step-00000004-g0001-first")
    saved.fail(step=3, times=1)


def from_scratch(saved: SavedRun) -> None:
    saved.begin("second", begin="scratch")


def lost(saved: SavedRun) -> None:
    for name in saved.folders:
        (saved.path(name) / SHARD).unlink()


@pytest.mark.parametrize(
    "happen",
    [as_it_is, torn, granted, fallen_back, set_aside, stuck, stuck_again, from_scratch, lost],
    ids=lambda happen: happen.__name__,
)
def test_the_next_attempt_does_what_the_list_has_said(
    saved: SavedRun, happen: Callable[[SavedRun], None], capsys: pytest.CaptureFixture[str]
) -> None:
    happen(saved)
    told = listed(saved.uri, capsys)["resumes_from"]
    saved.begin("next")
    refused = False
    found = None
    try:
        set_aside_if_stuck(saved.lease, after_failures=3)
        found, skipped = first_that_loads(candidates(saved.lease), lambda _candidate: None)
        settle(saved.lease, found, skipped)
    except NoCheckpointError:
        refused = True
    name = None if found is None else found.name
    assert (told["name"], told["refusal"] is not None) == (name, refused)


def test_looking_writes_nothing_into_the_log(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    before = saved.log_entries
    listed(saved.uri, capsys)
    assert saved.log_entries == before


def test_a_run_file_names_the_place_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text("x = 1\n" * 1000)
    overrides = [
        "experiment.data.source=text",
        f"runtime.data_path={text}",
        f"checkpoint.root={tmp_path}/root",
    ]
    run_id = identify(load(RUN_FILE, overrides)).run_id
    SavedRun(tmp_path / "root" / run_id).save(3)
    sets = [word for override in overrides for word in ("--set", override)]
    assert run(["checkpoints", "list", str(RUN_FILE), *sets, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["uri"] == f"{tmp_path}/root/{run_id}"


def test_the_folder_above_the_runs_is_refused_with_their_names(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "list", str(Path(saved.uri).parent)]) == 2
    assert "below it are these: tiny-0123" in capsys.readouterr().err


def test_a_place_without_a_run_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "list", str(tmp_path / "absent")]) == 2
    assert f"there is no run at {tmp_path}/absent" in capsys.readouterr().err


def test_an_override_without_a_run_file_is_wrong_usage(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "list", saved.uri, "--set", "checkpoint.keep=1"]) == 2
    assert "--set checkpoint.keep=1 changes a run file" in capsys.readouterr().err


def test_an_unknown_kind_of_store_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", "list", "nope://bucket/run"]) == 2
    assert "can't open nope://bucket/run" in capsys.readouterr().err


def test_whole_checkpoints_check_as_good(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "check", saved.uri]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == [
        "good  step-00000004-g0001-first",
        "good  step-00000002-g0001-first",
    ]
    assert captured.err == ""


def test_a_flipped_bit_is_found_though_no_size_tells(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.flip("step-00000004-g0001-first")
    assert run(["checkpoints", "check", saved.uri]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"BAD   step-00000004-g0001-first: {SHARD} has the digest xxh3")


def test_checking_stops_at_the_first_bad_one(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.flip("step-00000004-g0001-first")
    run(["checkpoints", "check", saved.uri, "--json"])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(result["name"], result["good"]) for result in found] == [
        ("step-00000004-g0001-first", False)
    ]


def test_checking_all_goes_on_after_a_bad_one(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.flip("step-00000004-g0001-first")
    assert run(["checkpoints", "check", saved.uri, "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [result["good"] for result in found] == [False, True]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_called_bad(
    saved: SavedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault_of(_filesystem: Any, folder: str, *_args: Any, **_options: Any) -> str | None:
        if "step-00000002" not in folder:
            return None
        (Path(folder) / MARKER).unlink()
        return "it is missing"

    monkeypatch.setattr("kettle.checkpoint.check.fault_of", fault_of)
    assert run(["checkpoints", "check", saved.uri]) == 0
    assert "step-00000002-g0001-first was deleted meanwhile" in capsys.readouterr().err


def test_one_checkpoint_can_be_checked_alone(saved: SavedRun) -> None:
    saved.flip("step-00000004-g0001-first")
    assert run(["checkpoints", "check", f"{saved.uri}/step-00000002-g0001-first/"]) == 0


def test_a_torn_checkpoint_checks_as_bad(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.path("step-00000002-g0001-first") / SHARD).unlink()
    assert run(["checkpoints", "check", saved.uri]) == 1
    assert f"step-00000002-g0001-first: {SHARD} is missing" in capsys.readouterr().out


def test_nothing_to_check_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "check", SavedRun(tmp_path / "run").uri]) == 2
    assert "so there is none to check" in capsys.readouterr().err


def test_an_unfinished_save_can_not_be_checked(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _ = saved.write(6)
    assert run(["checkpoints", "check", f"{saved.uri}/{name}"]) == 2
    assert "can't be checked; it is uncommitted" in capsys.readouterr().err


def test_release_takes_a_checkpoint_out_of_quarantine(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.quarantine("step-00000004-g0001-first")
    assert run(["checkpoints", "release", f"{saved.uri}/step-00000004-g0001-first"]) == 0
    assert "released step-00000004-g0001-first" in capsys.readouterr().out
    assert listed(saved.uri, capsys)["resumes_from"]["step"] == 4


def test_release_with_json_is_one_document(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.quarantine("step-00000004-g0001-first")
    uri = f"{saved.uri}/step-00000004-g0001-first"
    assert run(["checkpoints", "release", uri, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint_uri": uri, "released": True}


def test_release_leaves_the_run_to_the_attempt_that_holds_it(saved: SavedRun) -> None:
    saved.quarantine("step-00000004-g0001-first")
    run(["checkpoints", "release", f"{saved.uri}/step-00000004-g0001-first"])
    assert read_tail(saved.lease.filesystem, saved.lease.prefix).state.attempt_id == "first"


def test_a_checkpoint_that_is_not_in_quarantine_can_not_be_released(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "release", f"{saved.uri}/step-00000004-g0001-first"]) == 2
    assert "is not in quarantine; it is committed" in capsys.readouterr().err


def test_a_run_is_no_checkpoint(saved: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", "show", saved.uri]) == 2
    assert f"{saved.uri} names no checkpoint" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_wrong_usage(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "show", f"{saved.uri}/step-00000009-g0001-first"]) == 2
    assert "there is no step-00000009-g0001-first" in capsys.readouterr().err


@pytest.fixture
def with_parts(tmp_path: Path) -> str:
    state = {
        "model": {"w": torch.zeros(3, 2), "b": torch.zeros(2)},
        "rng.vrank0": {"torch": torch.zeros(5, dtype=torch.uint8)},
    }
    return committed(tmp_path / "run" / "step-00000004-g0001-a", state, step=4)


def test_show_counts_tensors_and_bytes_of_each_part(
    with_parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "show", with_parts, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == [
        {"name": "model", "tensors": 2, "size_bytes": 32},
        {"name": "rng.vrank0", "tensors": 1, "size_bytes": 5},
    ]


def test_show_prints_everything_that_the_marker_says(
    with_parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["checkpoints", "show", with_parts, "--json"])
    shown = json.loads(capsys.readouterr().out)["marker"]
    assert shown == json.loads((Path(with_parts) / MARKER).read_text())


def test_show_names_objects_with_their_digests(
    with_parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["checkpoints", "show", with_parts])
    told = json.loads((Path(with_parts) / MARKER).read_text())["objects"][SHARD]
    line = f"{SHARD} {told['size_bytes']} {told['digest']}"
    assert line in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("command", ["list", "show", "check", "prune", "release", "export"])
def test_the_help_of_each_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", command, "--help"]) == 0
    assert f"Example: kettle checkpoints {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "status"),
    [(["list"], 0), (["check"], 0), (["prune", "--keep", "1", "--yes"], 0), (["release"], 2)],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_putting_checkpoints_in_order_needs_no_torch(
    saved: SavedRun, command: list[str], status: int
) -> None:
    uri = saved.uri if command != ["release"] else f"{saved.uri}/step-00000004-g0001-first"
    program = "\n".join(
        [
            "import sys",
            "from kettle.cli.app import run",
            f"assert run({['checkpoints', *command, uri]!r}) == {status}",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
