import contextlib
import io

import pytest
from rich.text import Text

from kettle.cli.render import say, show, show_json


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def shown_on_a_terminal() -> str:
    with contextlib.redirect_stdout(Terminal()) as stream:
        show(Text("true", style="green"))
    return stream.getvalue()


def test_a_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in shown_on_a_terminal()


def test_no_color_is_honoured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown_on_a_terminal()


def test_talk_goes_to_stderr_word_for_word(capsys: pytest.CaptureFixture[str]) -> None:
    say("[bold]not markup[/bold] " + "x" * 200)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "[bold]not markup[/bold] " + "x" * 200 + "\n"


def test_a_long_json_string_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"uri": "x" * 500})
    assert capsys.readouterr().out == '{\n  "uri": "' + "x" * 500 + '"\n}\n'
