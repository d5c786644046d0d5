import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import typer

from kettle.cli.app import app, run


def test_the_command_line_imports_no_torch() -> None:
    program = "import kettle.cli.app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_version_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kettle ")


@pytest.mark.parametrize("command", ["verify", "compare"])
def test_the_help_of_a_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: kettle {command} " in capsys.readouterr().out


def commands(command: Any, path: str = "") -> list[str]:
    """The words of a command and of all below it."""
    below: dict[str, Any] = getattr(command, "commands", {})
    inner = [words for name in below for words in commands(below[name], f"{path} {name}".strip())]
    return [path, *inner]


@pytest.mark.parametrize("command", commands(typer.main.get_command(app)))
def test_help_fills_the_lines_of_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run([*command.split(), "--help"])
    prose = capsys.readouterr().out.partition("╭")[0].splitlines()
    for line, following in pairwise(prose):
        if line.strip() and following.strip():
            assert len(f"{line.rstrip()} {following.split()[0]}") > 79, line


def test_a_command_that_is_not_known_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["brew"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "brew" in captured.err


def test_an_expected_error_is_one_message_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["verify", "[absent].jsonl"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: can't read log [absent].jsonl: No such file")
