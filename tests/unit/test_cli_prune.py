import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kettle.checkpoint.layout import MARKER
from kettle.cli.app import run
from kettle.config import load
from kettle.data.identify import identify
from support.saved import SHARD, SavedRun

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples" / "stdlib.toml"


def folder(step: int, generation: int = 1, attempt: str = "first") -> str:
    return f"step-{step:08d}-g{generation:04d}-{attempt}"


@pytest.fixture
def saved(tmp_path: Path) -> SavedRun:
    """Generation 1 has saved steps 2, 4, 6 and 8, and holds the run."""
    made = SavedRun(tmp_path / "root" / "tiny")
    for step in (2, 4, 6, 8):
        made.save(step)
    return made


def prune(saved: SavedRun, *options: str) -> int:
    return run(["checkpoints", "prune", saved.uri, *options])


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let a person sit at a terminal and answer."""

    def answer(yes: bool) -> None:  # noqa: FBT001 - the answer
        for stream in (sys.stdin, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setattr(typer, "confirm", lambda *_args, **_options: yes)

    return answer


def test_only_the_newest_are_kept(saved: SavedRun) -> None:
    assert prune(saved, "--keep", "2", "--yes") == 0
    assert saved.folders == {folder(6), folder(8)}


def test_those_of_every_so_many_steps_are_kept_as_well(saved: SavedRun) -> None:
    prune(saved, "--keep", "1", "--keep-every", "4", "--yes")
    assert saved.folders == {folder(4), folder(8)}


def test_the_plan_names_what_goes_what_stays_and_the_bytes(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    size_bytes = sum(path.stat().st_size for path in saved.path(folder(2)).iterdir())
    prune(saved, "--keep", "3")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["keep", folder(8)],
        ["keep", folder(6)],
        ["keep", folder(4)],
        ["delete", folder(2)],
    ]
    assert lines[4].endswith(f"({size_bytes} bytes)")


def test_without_a_terminal_nothing_is_deleted_and_nobody_is_asked(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(saved, "--keep", "1") == 2
    assert "nothing was deleted; add --yes" in capsys.readouterr().err
    assert len(saved.folders) == 4


def test_a_no_at_the_terminal_deletes_nothing(
    saved: SavedRun, answering: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answering(False)  # noqa: FBT003 - the answer
    assert prune(saved, "--keep", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was deleted"
    assert len(saved.folders) == 4


def test_a_yes_at_the_terminal_deletes(saved: SavedRun, answering: Callable[[bool], None]) -> None:
    answering(True)  # noqa: FBT003 - the answer
    prune(saved, "--keep", "1")
    assert saved.folders == {folder(8)}


def test_nothing_to_delete_needs_no_answer(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(saved, "--keep", "4") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to delete"


def test_a_uri_does_not_say_how_many_to_keep(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(saved, "--yes") == 2
    assert "add --keep N" in capsys.readouterr().err


def test_a_run_file_says_how_many_to_keep(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("x = 1\n" * 1000)
    overrides = [
        "experiment.data.source=text",
        f"runtime.data_path={text}",
        f"checkpoint.root={tmp_path}/root",
        "checkpoint.keep=1",
        "checkpoint.keep_every=3",
    ]
    saved = SavedRun(tmp_path / "root" / identify(load(RUN_FILE, overrides)).run_id)
    for step in (2, 3, 4):
        saved.save(step)
    sets = [word for override in overrides for word in ("--set", override)]
    assert run(["checkpoints", "prune", str(RUN_FILE), *sets, "--yes"]) == 0
    assert saved.folders == {folder(3), folder(4)}


def test_pruning_does_not_claim_the_run(saved: SavedRun) -> None:
    entries = saved.log_entries
    prune(saved, "--keep", "1", "--yes")
    assert saved.log_entries == entries


def test_the_attempt_that_holds_the_run_goes_on_saving_after_a_prune(saved: SavedRun) -> None:
    prune(saved, "--keep", "1", "--yes")
    saved.save(10)
    assert saved.folders == {folder(8), folder(10)}


def test_what_the_newest_attempt_is_writing_stays_however_old(saved: SavedRun) -> None:
    name, _ = saved.write(9)
    saved.age(name, hours=100)
    prune(saved, "--keep", "9", "--debris-older-than", "0", "--yes")
    assert name in saved.folders


def test_debris_of_a_superseded_attempt_goes(saved: SavedRun) -> None:
    name, _ = saved.write(9)
    saved.age(name, hours=2)
    saved.begin("second")
    prune(saved, "--keep", "9", "--yes")
    assert name not in saved.folders


def test_young_debris_stays(saved: SavedRun) -> None:
    name, _ = saved.write(9)
    saved.age(name, hours=2)
    saved.begin("second")
    prune(saved, "--keep", "9", "--debris-older-than", "3", "--yes")
    assert name in saved.folders


def test_a_granted_checkpoint_without_its_marker_stays(saved: SavedRun) -> None:
    name = saved.save(9)
    (saved.path(name) / MARKER).unlink()
    saved.age(name, hours=100)
    saved.begin("second")
    prune(saved, "--keep", "1", "--yes")
    assert name in saved.folders


def test_what_was_left_behind_goes_once_the_run_has_saved_again(saved: SavedRun) -> None:
    saved.begin("second", begin="scratch")
    new = saved.save(2)
    prune(saved, "--keep", "3", "--yes")
    assert saved.folders == {new}


def test_what_was_left_behind_stays_while_there_is_nothing_else(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.begin("second", begin="scratch")
    assert prune(saved, "--keep", "3", "--yes") == 1
    assert "no checkpoint that stays is whole" in capsys.readouterr().err
    assert len(saved.folders) == 4


def test_a_damaged_checkpoint_goes_and_takes_no_place(saved: SavedRun) -> None:
    saved.find_damaged(folder(6), restored=folder(8))
    prune(saved, "--keep", "2", "--yes")
    assert saved.folders == {folder(4), folder(8)}


def test_a_torn_checkpoint_goes_and_takes_no_place(saved: SavedRun) -> None:
    (saved.path(folder(6)) / SHARD).unlink()
    prune(saved, "--keep", "2", "--yes")
    assert saved.folders == {folder(4), folder(8)}


def test_quarantined_checkpoints_stay(saved: SavedRun) -> None:
    saved.quarantine(folder(8))
    prune(saved, "--keep", "1", "--yes")
    assert saved.folders == {folder(6), folder(8)}


def test_quarantined_checkpoints_go_when_asked_for(saved: SavedRun) -> None:
    saved.quarantine(folder(8))
    prune(saved, "--keep", "1", "--quarantined", "--yes")
    assert saved.folders == {folder(6)}


def test_nothing_committed_goes_if_none_that_stays_is_whole(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.flip(folder(8))
    assert prune(saved, "--keep", "1", "--yes") == 1
    assert f"{folder(8)}: {SHARD} has the digest" in capsys.readouterr().err
    assert len(saved.folders) == 4


def test_a_folder_with_a_file_of_somebody_else_keeps_it(saved: SavedRun) -> None:
    note = saved.path(folder(2)) / "notes.txt"
    note.write_text("mine")
    prune(saved, "--keep", "1", "--yes")
    assert [path.name for path in saved.path(folder(2)).iterdir()] == ["notes.txt"]


def test_what_appears_while_a_person_thinks_is_not_deleted(
    saved: SavedRun, answering: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(True)  # noqa: FBT003 - the answer

    def confirm(*_args: object, **_options: object) -> bool:
        saved.save(10)
        return True

    monkeypatch.setattr(typer, "confirm", confirm)
    prune(saved, "--keep", "1")
    assert saved.folders == {folder(8), folder(10)}


def test_one_checkpoint_can_not_be_pruned(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoints", "prune", f"{saved.uri}/{folder(2)}", "--keep", "1"]) == 2
    assert f"name its run, {saved.uri}" in capsys.readouterr().err


def test_keeping_none_is_wrong_usage(saved: SavedRun) -> None:
    assert prune(saved, "--keep", "0", "--yes") == 2


def test_json_is_one_document_and_the_words_go_to_stderr(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(saved, "--keep", "2", "--yes", "--json") == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["deleted"] == [folder(4), folder(2)]
    assert document["freed_bytes"] > 0
    assert "kept" in told.err


def test_json_of_a_prune_without_anything_to_delete_says_so(
    saved: SavedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune(saved, "--keep", "9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == []
