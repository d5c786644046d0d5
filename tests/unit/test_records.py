import json
from typing import Any, Literal, get_args, get_origin

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.records import Record, Step, StopDecided, emit, json_schema, parse_line

KINDS: tuple[type[Any], ...] = get_args(get_args(Record)[0])
SCHEMA = jsonschema.Draft202012Validator(json_schema())


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
    if annotation is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if annotation is str:
        return st.text()
    if annotation is int:
        return st.integers()
    choices: tuple[Any, ...] = get_args(annotation)
    return st.one_of(*(st.none() if c is type(None) else values_of(c) for c in choices))


def any_record(kind: type[Any]) -> st.SearchStrategy[Any]:
    fields = kind.model_fields.items()
    return st.builds(kind, **{name: values_of(field.annotation) for name, field in fields})


def a_stop() -> StopDecided:
    return StopDecided(run_id="r", attempt_id="a", step=3, micro_batch=1, waited_ms=None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_record_survives_the_way_through_a_line(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(any_record(kind))
    line = record.model_dump_json()
    assert "\n" not in line
    assert parse_line(line) == record


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_record_is_flat(kind: type[Any], data: st.DataObject) -> None:
    document = json.loads(data.draw(any_record(kind)).model_dump_json())
    nested = {name for name, value in document.items() if isinstance(value, dict | list)}
    assert nested <= {"versions", "resource"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_field_that_a_reader_does_not_know_is_ignored(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(any_record(kind))
    document = json.loads(record.model_dump_json()) | {"from_a_later_version": {"deep": [1]}}
    assert parse_line(json.dumps(document)) == record


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_record_fits_the_published_schema(kind: type[Any], data: st.DataObject) -> None:
    SCHEMA.validate(json.loads(data.draw(any_record(kind)).model_dump_json()))


def test_line_without_its_fields_does_not_fit_the_published_schema() -> None:
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate({"event": "step", "run_id": "r", "attempt_id": "a"})


def test_event_that_a_reader_does_not_know_is_ignored() -> None:
    document = json.loads(a_stop().model_dump_json()) | {"event": "evaluation"}
    assert parse_line(json.dumps(document)) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        "loading weights: 100%",
        "{",
        "{}",
        "[1, 2]",
        "null",
        '"event"',
        '{"event": 3}',
        '{"event": "step"}',
        '{"level": "info", "message": "not ours"}',
        "{'event': 'step'}",
    ],
)
def test_line_that_is_no_record_is_ignored(line: str) -> None:
    assert parse_line(line) is None


@given(line=st.text())
def test_no_line_is_an_error(line: str) -> None:
    assert parse_line(line) is None


def test_record_between_blanks_is_read() -> None:
    record = a_stop()
    assert parse_line("  " + record.model_dump_json() + "\r\n") == record


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_step_whose_gradients_overflowed_is_no_lost_step(norm: float) -> None:
    record = Step(
        run_id="r",
        attempt_id="a",
        step=1,
        epoch=0,
        loss=5.5,
        lr=1e-3,
        grad_norm=norm,
        tokens=8,
        tokens_per_s=100.0,
        step_ms=80.0,
        world_size=1,
        sample_digest="0" * 16,
    )
    read = parse_line(record.model_dump_json())
    assert isinstance(read, Step)
    assert repr(read.grad_norm) == repr(norm)


def test_emitted_record_is_one_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    record = a_stop()
    emit(record)
    emit(record)
    out, err = capsys.readouterr()
    assert out == 2 * (record.model_dump_json() + "\n")
    assert err == ""
