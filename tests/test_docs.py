"""Every command that the pages show is real.

In a `console` block a line that begins with `$ ` is a command, and the lines after it are what it
prints. The commands of a page are run in their order in a folder of their own, so that a page reads
as a story that happened. What would take minutes is checked without running it: `make` says that it
knows the target, and the eviction of a whole run is parsed and planned.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from kettle.chaos.plan import parse_workers, plan_evictions
from kettle.cli.app import app
from kettle.config import load
from support.processes import started

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "reference" / "cli.md"  # usage with placeholders, from the code itself
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page != GENERATED),
]
FAST = {"hidden_size": 24, "intermediate_size": 37, "layers": 1, "sequence_length": 48}
STORY_S = 240.0
STARTS_RANKS = re.compile(r"\bkettle (launch|train)\b")

BLOCK = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:make|kettle) [^`\n]+)`(?!`)")
TABLE = re.compile(r"[━─│┃]|^\s*$|\.\.\.")
"""Lines of shown output that hold times and ids, or stand for lines left out."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, and the lines that it says the command prints."""

    line: str
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def is_only_checked(self) -> bool:
        return self.words[0] == "make" or self.words[:2] == ["kettle", "chaos"]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    for _, language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield language, body


def commands(page: Path) -> list[Command]:
    found: list[Command] = []
    for language, body in blocks(page):
        if language == "console":
            first, *rest = re.split(r"^\s*\$ ", body.replace("\\\n", ""), flags=re.MULTILINE)
            assert not first.strip(), f"{page.name}: {first!r} is output without a command"
            for text in rest:
                line, *shown = text.rstrip().splitlines()
                found.append(Command(line, tuple(s for s in shown if not TABLE.search(s))))
    return found


COMMANDS = {name_of(page): commands(page) for page in PAGES}
CHECKED = sorted({c.line for all_ in COMMANDS.values() for c in all_ if c.is_only_checked})


def stories() -> dict[str, list[Command]]:
    """What is really run, by page; a page that only repeats another's commands has no story."""
    told: dict[str, list[Command]] = {}
    by_length = sorted(COMMANDS.items(), key=lambda item: -len(item[1]))
    for page, all_ in by_length:
        story = [command for command in all_ if not command.is_only_checked]
        lines = {command.line for command in story}
        if not any(lines <= {c.line for c in other} for other in told.values()):
            told[page] = story
    return told


def as_parameters() -> list[object]:
    return [
        pytest.param(
            story,
            id=page,
            marks=[pytest.mark.dist] if any(STARTS_RANKS.search(c.line) for c in story) else [],
        )
        for page, story in stories().items()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("story", as_parameters())
def test_commands_of_a_page_run_and_print_what_it_shows(
    tmp_path_factory: pytest.TempPathFactory, story: list[Command]
) -> None:
    # Not tmp_path: with a long test name in it, no socket fits under the temporary folder.
    place = tmp_path_factory.mktemp("docs")
    prepare(place)
    told = "".join(f"{command.line}\nprintf '\\n@@ %d\\n' $?\n" for command in story)
    script = f"cd {shlex.quote(str(place))} && exec 2>&1 || exit\n{told}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    arguments = ["bash", "-u", "-o", "pipefail", "-c", script]
    with started(place, arguments, environment={"PATH": path, "COLUMNS": "100"}) as shell:
        shell.process.wait(STORY_S)
        stdout = shell.ended().stdout
    answers = re.split(r"\n@@ (\d+)\n", stdout)
    assert len(answers) == 2 * len(story) + 1, stdout
    for command, printed, status in zip(story, answers[::2], answers[1::2], strict=False):
        assert status == "0", f"{command.line}\nended with {status}:\n{printed}"
        for line in command.shown:
            assert line.strip() in printed, f"{command.line}\nprinted:\n{printed}"


def prepare(place: Path) -> None:
    """The files of a clone that commands name; the models of the examples are made small."""
    for name in ("docs", "scripts", "src", "tests"):
        (place / name).symlink_to(ROOT / name)
    (place / "examples").mkdir()
    for example in (ROOT / "examples").glob("*.toml"):
        text = example.read_text(encoding="utf-8")
        for key, value in FAST.items():
            text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        (place / "examples" / example.name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("line", CHECKED)
def test_command_that_takes_minutes_could_be_run(line: str) -> None:
    check(shlex.split(line, comments=True))


def targets() -> list[str]:
    """What `make help` lists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)


def check(words: list[str]) -> None:
    if words[0] == "make":
        make = shutil.which("make")
        assert make
        # A folder of the same name would be a target, too: `make tests` finds nothing to do.
        assert words[1] in targets(), words
        subprocess.run([make, "-n", *words[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return
    _, verb, *arguments = words
    assert verb == "chaos"
    root = typer.main.get_command(app)
    given = root.commands[verb].make_context(verb, arguments).params  # type: ignore[attr-defined]
    experiment = load(ROOT / given["run_file"], given["overrides"] or []).experiment
    assert plan_evictions(experiment.total_steps, given["evictions"], given["seed"])
    assert parse_workers(given["workers"], virtual_ranks=experiment.virtual_ranks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_a_sentence_are_known(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    root = typer.main.get_command(app)
    for text in INLINE.findall(prose):
        program, word, *_ = text.split()
        if program == "make":
            assert word in targets(), text
        elif word not in {"config", "--help", "--version"}:
            assert word in root.commands, text  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert named <= set(re.findall(r"def (test_\w+)", tests))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_files_that_a_page_links_to_exist(page: Path) -> None:
    # The pages below docs/ are checked by `make docs`.
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_stand_in_console_blocks(page: Path) -> None:
    assert not {"bash", "sh", "shell"} & {language for language, _ in blocks(page)}
