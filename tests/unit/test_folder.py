from pathlib import Path

import pytest

from kettle.chaos.folder import claim
from kettle.errors import UsageError


def test_a_new_folder_gets_a_place_for_each_run(tmp_path: Path) -> None:
    folder = claim(tmp_path / "not" / "there")
    assert [side.path.name for side in (*folder.references, folder.trial)] == [
        "reference-1",
        "reference-2",
        "trial",
    ]
    assert all(side.path.is_dir() for side in (*folder.references, folder.trial))


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    assert claim(tmp_path).trial.path.is_dir()


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "trial" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(UsageError, match="no chaos run wrote it"):
        claim(tmp_path)
    assert precious.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        claim(file)


def test_what_an_earlier_chaos_run_wrote_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = claim(tmp_path)
    folder.trial.log(1).write_text("old")
    folder.result.write_text("old")
    for plot in folder.plots:
        plot.write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path)
    assert list(folder.trial.path.iterdir()) == []
    assert not folder.result.exists()
    assert not any(plot.exists() for plot in folder.plots)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_link_is_removed_without_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    folder = claim(tmp_path / "out")
    folder.trial.path.rmdir()
    folder.trial.path.symlink_to(elsewhere)
    claim(tmp_path / "out")
    assert (elsewhere / "mine").read_text() == "mine"
    assert not folder.trial.path.is_symlink()
