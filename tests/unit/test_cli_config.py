import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.cli.app import run
from kettle.cli.config import _toml_lines
from kettle.config import load

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = str(ROOT / "examples" / "stdlib.toml")


@pytest.fixture
def text_run(tmp_path: Path) -> list[str]:
    """Arguments that make the example read one small file."""
    text = tmp_path / "text.py"
    text.write_text("x = 1\n" * 1000)
    path = f"runtime.data_path={text}"
    return [RUN_FILE, "--set", "experiment.data.source=text", "--set", path]


def test_what_is_shown_is_a_run_file_with_the_same_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["experiment.optim.lr=1e-7", 'checkpoint.root="a \\"b\\" \\\\ é"']
    sets = [word for override in overrides for word in ("--set", override)]
    assert run(["config", "show", RUN_FILE, *sets]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load(again) == load(Path(RUN_FILE), overrides)


def test_defaults_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run(["config", "show", RUN_FILE])
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["experiment"]["optim"]["beta2"] == 0.999
    assert shown["runtime"]["exchange"] == "auto"


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False),
    )
)
def test_any_value_survives_toml(section: dict[str, object]) -> None:
    finite = {k: v for k, v in section.items() if v not in {float("inf"), float("-inf")}}
    text = "\n".join(_toml_lines({"top": 1, "inner": {"values": finite}}))
    assert tomllib.loads(text) == {"top": 1, "inner": {"values": finite}}


def test_json_is_one_document_with_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", RUN_FILE, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == load(Path(RUN_FILE)).model_dump(mode="json")
    assert captured.err == ""


def test_a_field_that_is_not_known_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", RUN_FILE, "--set", "experiment.sed=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "experiment.sed: unknown key (value 1); did you mean seed?" in captured.err


def test_the_run_id_begins_with_the_name_and_ends_with_the_fingerprint(
    text_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "fingerprint", *text_run, "--json"]) == 0
    identity = json.loads(capsys.readouterr().out)
    assert identity["run_id"] == f"stdlib-tiny-{identity['fingerprint'][:12]}"


def test_text_and_json_name_the_same_run(
    text_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(["config", "fingerprint", *text_run, "--json"])
    identity = json.loads(capsys.readouterr().out)
    run(["config", "fingerprint", *text_run])
    assert capsys.readouterr().out.split() == [
        *("run", "id", identity["run_id"]),
        *("fingerprint", identity["fingerprint"]),
        *("data", "digest", identity["data_digest"]),
    ]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("checkpoint.root=elsewhere", True),
        ("runtime.grace_seconds=9.0", True),
        ("experiment.seed=18", False),
    ],
)
def test_an_experiment_field_makes_another_run_and_no_other_field_does(
    text_run: list[str], capsys: pytest.CaptureFixture[str], override: str, *, same: bool
) -> None:
    run(["config", "fingerprint", *text_run])
    before = capsys.readouterr().out
    run(["config", "fingerprint", *text_run, "--set", override])
    assert (capsys.readouterr().out == before) is same


def test_another_text_makes_another_run(
    tmp_path: Path, text_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(["config", "fingerprint", *text_run])
    before = capsys.readouterr().out
    (tmp_path / "text.py").write_text("x = 2\n" * 1000)
    run(["config", "fingerprint", *text_run])
    assert capsys.readouterr().out != before


def test_data_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "experiment.data.source=text", "--set", "runtime.data_path=absent/"]
    assert run(["config", "fingerprint", RUN_FILE, *sets]) == 2
    assert "/absent; check runtime.data_path" in capsys.readouterr().err


def test_the_schema_accepts_the_example_and_refuses_an_unknown_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    example = tomllib.loads(Path(RUN_FILE).read_text(encoding="utf-8"))
    jsonschema.validate(example, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**example, "nmae": "x"}, schema)


@pytest.mark.parametrize("command", [["show"], ["fingerprint"], ["schema"]], ids=lambda c: c[0])
def test_looking_at_a_run_file_needs_no_torch(command: list[str], text_run: list[str]) -> None:
    arguments = ["config", *command, *(text_run if command != ["schema"] else [])]
    program = "\n".join(
        [
            "import sys",
            "from kettle.cli.app import run",
            f"assert run({arguments!r}) == 0",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
