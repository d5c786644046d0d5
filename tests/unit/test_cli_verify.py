import subprocess
import sys
from pathlib import Path

import pytest

from kettle.cli.app import run
from kettle.evidence.checks import Verdict
from support.logs import flat, interrupted_run, write_log


@pytest.fixture
def whole(tmp_path: Path) -> str:
    return str(write_log(tmp_path / "whole.jsonl", flat(interrupted_run(4, 9, 12))))


@pytest.fixture
def holed(tmp_path: Path) -> str:
    first, _, last = interrupted_run(4, 9, 12)
    return str(write_log(tmp_path / "holed.jsonl", [*first, *last]))


def test_a_whole_run_exits_0_with_the_sentence(
    whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", whole]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "every step 1..12 executed once across 3 attempts, with 2 resumes"


def test_a_run_with_a_hole_exits_1_and_names_it(
    holed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", holed]) == 1
    assert "steps 5-9 are missing" in capsys.readouterr().out


def test_json_is_one_document_with_the_verdict(
    whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["verify", "--json", whole])
    captured = capsys.readouterr()
    assert Verdict.model_validate_json(captured.out).verdict
    assert captured.err == ""


def test_json_and_text_exit_alike(holed: str) -> None:
    assert run(["verify", "--json", holed]) == 1


def test_an_attempt_may_have_a_log_of_its_own(tmp_path: Path) -> None:
    for number, log in enumerate(interrupted_run(4, 9, 12)):
        write_log(tmp_path / f"{number}.jsonl", log)
    assert run(["verify", str(tmp_path)]) == 0


def test_no_log_is_wrong_usage() -> None:
    assert run(["verify"]) == 2


def test_output_to_a_file_has_no_colour(whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["verify", whole])
    assert "\x1b" not in capsys.readouterr().out


def test_verifying_needs_no_torch(whole: str) -> None:
    program = "\n".join(
        [
            "import sys",
            "from kettle.cli.app import run",
            f"assert run(['verify', {whole!r}]) == 0",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
