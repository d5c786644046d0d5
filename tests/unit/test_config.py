import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kettle.config import deployment_facts, load
from kettle.errors import ConfigError
from kettle.exits import ExitCode

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stdlib.toml"


def refused(*overrides: str, path: Path = EXAMPLE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


def test_example_loads_as_it_is() -> None:
    config = load(EXAMPLE)
    assert config.experiment.virtual_ranks == 4
    assert config.experiment.global_batch == 4 * 2 * 2


def test_override_replaces_a_field_and_leaves_the_rest() -> None:
    config = load(EXAMPLE, ["experiment.total_steps=100", "checkpoint.root=s3://bucket/runs"])
    assert config.experiment.total_steps == 100
    assert config.checkpoint.root == "s3://bucket/runs"
    assert config.experiment.seed == load(EXAMPLE).experiment.seed


def test_last_of_two_overrides_of_one_field_counts() -> None:
    config = load(EXAMPLE, ["experiment.seed=1", "experiment.seed=2"])
    assert config.experiment.seed == 2


def test_override_may_name_a_section_that_the_file_leaves_out(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    short = tmp_path / "run.toml"
    short.write_text(text[: text.index("[runtime]")], encoding="utf-8")
    assert load(short, ["runtime.loader_workers=2"]).runtime.loader_workers == 2


@pytest.mark.parametrize(
    ("text", "root"),
    [("a/b", "a/b"), ('"a b"', "a b"), ("gs://b/x=y", "gs://b/x=y"), ("'7'", "7")],
)
def test_override_takes_text_with_and_without_quotes(text: str, root: str) -> None:
    assert load(EXAMPLE, [f"checkpoint.root={text}"]).checkpoint.root == root


@pytest.mark.parametrize(
    ("override", "where", "remedy"),
    [
        ("experiment.total_step=5", "experiment.total_step", "did you mean total_steps?"),
        ("experiment.optim.learning=1.0", "experiment.optim.learning", "known here: lr, schedule"),
        ("runtime.grace=5", "runtime.grace", "grace_seconds"),
        ("optimizer.lr=1.0", "optimizer", "known here: name, experiment"),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_what_is_known(
    override: str, where: str, remedy: str
) -> None:
    message = refused(override)
    assert f"{where}: unknown key" in message
    assert remedy in message


def test_unknown_key_is_refused_with_its_value() -> None:
    assert "value 12.5" in refused("runtime.grace=12.5")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("experiment.total_steps='60'", "experiment.total_steps = '60'"),
        ("experiment.total_steps=60.0", "experiment.total_steps = 60.0"),
        ("experiment.total_steps=true", "experiment.total_steps = True"),
        ("experiment.total_steps=0", "experiment.total_steps = 0"),
        ("experiment.model.tie_embeddings=1", "experiment.model.tie_embeddings = 1"),
        ("experiment.model.attention_dropout=1.0", "experiment.model.attention_dropout = 1.0"),
        ("experiment.optim.lr=nan", "experiment.optim.lr = nan"),
        ("experiment.optim.lr=inf", "experiment.optim.lr = inf"),
        ("experiment.optim.schedule=cosinus", "experiment.optim.schedule = 'cosinus'"),
        ("experiment.seed=9223372036854775808", "experiment.seed = 9223372036854775808"),
        ("checkpoint.root=", "checkpoint.root = ''"),
        ("runtime.timeout_seconds=1e300", "runtime.timeout_seconds = 1e+300"),
        ("experiment.data.include=/etc/*", "experiment.data.include = '/etc/*'"),
        ("experiment.data.include=", "experiment.data.include = ''"),
        (f"experiment.seed={'9' * 5000}", "experiment.seed = '999"),
        ("checkpoint.every=0", "checkpoint.every = 0"),
        ("checkpoint.root=[1]", "checkpoint.root = [1]"),
        ("runtime.device=tpu", "runtime.device = 'tpu'"),
        ("name=Capitals", "name = 'Capitals'"),
    ],
)
def test_wrong_value_is_refused_with_its_path_and_a_remedy(override: str, shown: str) -> None:
    message = refused(override)
    assert shown in message
    assert "correct the value" in message


def test_value_in_place_of_a_section_is_refused_with_the_way_to_write_it() -> None:
    assert "experiment.optim = 3: is a section, no value; write it as [experiment.optim]" in (
        refused("experiment.optim=3")
    )


@pytest.mark.parametrize(
    ("overrides", "where", "value", "remedy"),
    [
        (["experiment.model.heads=5"], "experiment.model", "heads = 5", "choose a divisor"),
        (["experiment.model.heads=8"], "experiment.model", "7 is odd", "another number of heads"),
        (["experiment.model.kv_heads=3"], "experiment.model", "kv_heads = 3", "choose a divisor"),
        (
            ["experiment.data.source=text"],
            "run file",
            'source = "text"',
            "name a file, a folder or a glob",
        ),
        (
            ["runtime.data_path=books"],
            "run file",
            "data_path = 'books'",
            'set the source to "text"',
        ),
        (
            ["experiment.optim.warmup_steps=61"],
            "experiment",
            "optim.warmup_steps = 61",
            "shorten the warm-up",
        ),
        (
            ["experiment.model.vocab_size=256"],
            "experiment",
            "model.vocab_size = 256",
            "use at least 257",
        ),
    ],
)
def test_impossible_combination_is_refused_with_path_value_and_remedy(
    overrides: list[str], where: str, value: str, remedy: str
) -> None:
    message = refused(*overrides)
    assert re.search(rf"^  {re.escape(where)}: ", message, flags=re.MULTILINE)
    assert value in message
    assert remedy in message


def test_every_fault_is_listed_at_once() -> None:
    message = refused("experiment.seed=-1", "runtime.device=tpu", "checkpoint.kept=3")
    assert all(path in message for path in ("experiment.seed", "runtime.device", "checkpoint.kept"))


def test_missing_field_is_named(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("seed = 17\n", "")
    run_file = tmp_path / "run.toml"
    run_file.write_text(text, encoding="utf-8")
    assert "experiment.seed: is missing; add it" in refused(path=run_file)


@pytest.mark.parametrize("override", ["experiment.seed", "=3", ".seed=3", "experiment.=3", ""])
def test_override_that_is_no_assignment_is_refused_with_an_example(override: str) -> None:
    message = refused(override)
    assert repr(override) in message
    assert "--set experiment.total_steps=100" in message


def test_override_below_a_value_is_refused() -> None:
    message = refused("experiment.seed.low=1")
    assert "'experiment.seed.low=1'" in message
    assert "seed is a value, not a section" in message


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"can't read run file {missing}: No such file" in refused(path=missing)


def test_folder_is_refused_as_a_run_file(tmp_path: Path) -> None:
    assert f"can't read run file {tmp_path}" in refused(path=tmp_path)


@pytest.mark.parametrize("content", [b"name = ", b"[experiment\n", b"name = '\xff'"])
def test_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_bytes(content)
    assert f"{broken} is not valid TOML" in refused(path=broken)


def test_loaded_config_can_not_be_changed() -> None:
    config = load(EXAMPLE)
    with pytest.raises(ValidationError, match="frozen"):
        config.experiment.seed = 3  # type: ignore[misc]


@given(text=st.text(max_size=30))
def test_any_override_loads_or_is_refused_as_bad_input(text: str) -> None:
    try:
        load(EXAMPLE, [text, f"experiment.optim.lr={text}"])
    except ConfigError as error:
        assert error.exit_code is ExitCode.USAGE  # noqa: PT017 - a success is as good


def test_environment_gives_deployment_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KETTLE_GRACE", "12.5")
    monkeypatch.setenv("KETTLE_WORKERS", "4")
    monkeypatch.setenv("KETTLE_S3_ENDPOINT", "http://localhost:9000")
    monkeypatch.setenv("KETTLE_ATTEMPT_ID", "pod-3")
    facts = deployment_facts()
    assert facts.model_dump() == {
        "grace_seconds": 12.5,
        "s3_endpoint": "http://localhost:9000",
        "workers": 4,
        "attempt_id": "pod-3",
    }


def test_empty_environment_gives_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GRACE", "WORKERS", "S3_ENDPOINT", "ATTEMPT_ID"):
        monkeypatch.setenv(f"KETTLE_{variable}", "")
    assert set(deployment_facts().model_dump().values()) == {None}


@pytest.mark.parametrize("variable", ["KETTLE_GRACE", "KETTLE_WORKERS"])
@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan", "inf"])
def test_variable_that_is_no_positive_number_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=rf"{variable} = '{text}' .* set one or unset it"):
        deployment_facts()


def test_half_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KETTLE_WORKERS", "1.5")
    with pytest.raises(ConfigError, match=r"KETTLE_WORKERS = 1\.5 is not a whole number"):
        deployment_facts()
