"""Run as a script, it writes the golden file anew; a changed line there is another identity."""

import importlib.metadata
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kettle.config import RunConfig, load
from kettle.identity import checkpoint_prefix, fingerprint, library_versions, run_id

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GOLDEN = Path(__file__).parent / "golden" / "fingerprints.json"
DATA_DIGEST = "0" * 64


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*path, name))
        else:
            yield (*path, name)


def field_at(path: tuple[str, ...]) -> FieldInfo:
    model: type[BaseModel] = RunConfig
    *sections, name = path
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        model = annotation
    return model.model_fields[name]


def values_of(field: FieldInfo) -> st.SearchStrategy[object]:
    annotation: Any = field.annotation
    if get_origin(annotation) is Literal:
        # A value that a later version may add counts as much as those of today.
        return st.sampled_from([*get_args(annotation), "another"])
    if any(getattr(limit, "pattern", None) for limit in field.metadata):
        return st.from_regex(r"[a-z0-9]{1,40}", fullmatch=True)
    if field.metadata:
        annotation = Annotated[(annotation, *field.metadata)]
    values: st.SearchStrategy[object] = st.from_type(annotation)
    return values.filter(lambda value: not isinstance(value, float) or math.isfinite(value))


def changed(section: BaseModel, path: tuple[str, ...], value: object) -> BaseModel:
    name, *rest = path
    if rest:
        value = changed(getattr(section, name), tuple(rest), value)
    return section.model_copy(update={name: value})


def value_at(section: BaseModel, path: tuple[str, ...]) -> object:
    value: object = section
    for name in path:
        value = getattr(value, name)
    return value


def identity_of(config: BaseModel) -> str:
    assert isinstance(config, RunConfig)
    return fingerprint(config.experiment, data_digest=DATA_DIGEST)


BASE = load(EXAMPLES / "stdlib.toml")
ALL = list(leaves(RunConfig))
HASHED = [path for path in ALL if path[0] == "experiment"]
OTHERS = [path for path in ALL if path[0] != "experiment"]


@pytest.mark.parametrize("path", HASHED, ids=".".join)
@given(data=st.data())
def test_changing_an_experiment_field_makes_another_run(
    path: tuple[str, ...], data: st.DataObject
) -> None:
    value = data.draw(values_of(field_at(path)))
    assume(value != value_at(BASE, path))
    assert identity_of(changed(BASE, path, value)) != identity_of(BASE)


@pytest.mark.parametrize("path", OTHERS, ids=".".join)
@given(data=st.data())
def test_changing_any_other_field_keeps_the_fingerprint(
    path: tuple[str, ...], data: st.DataObject
) -> None:
    value = data.draw(values_of(field_at(path)))
    assert identity_of(changed(BASE, path, value)) == identity_of(BASE)


def test_fields_on_both_sides_of_the_line_are_found() -> None:
    assert ("experiment", "optim", "lr") in HASHED
    assert ("runtime", "grace_seconds") in OTHERS
    assert ("checkpoint", "root") in OTHERS
    assert len(HASHED) >= 30


def test_other_data_makes_another_run() -> None:
    assert fingerprint(BASE.experiment, data_digest="1" * 64) != identity_of(BASE)


def test_other_weights_to_start_from_make_another_run() -> None:
    other = fingerprint(BASE.experiment, data_digest=DATA_DIGEST, model_revision="abc")
    assert other != identity_of(BASE)


def test_order_of_keys_in_the_file_does_not_matter(tmp_path: Path) -> None:
    text = (EXAMPLES / "stdlib.toml").read_text(encoding="utf-8")
    turned = text.replace("seed = 17\ntotal_steps = 60\n", "total_steps = 60\nseed = 17\n")
    assert turned != text
    (tmp_path / "run.toml").write_text(turned, encoding="utf-8")
    assert identity_of(load(tmp_path / "run.toml")) == identity_of(BASE)


def test_writing_a_default_out_makes_no_other_run() -> None:
    assert identity_of(load(EXAMPLES / "stdlib.toml", ["experiment.optim.beta1=0.9"])) == (
        identity_of(BASE)
    )


def test_run_id_is_the_name_and_twelve_digits() -> None:
    assert run_id("stdlib-tiny", "0123456789abcdef" * 4) == "stdlib-tiny-0123456789ab"


@pytest.mark.parametrize("root", ["out/runs", "out/runs/"])
def test_checkpoints_lie_in_a_folder_of_the_run(root: str) -> None:
    assert checkpoint_prefix(root, "tiny-0123") == "out/runs/tiny-0123"


def test_recorded_versions_are_those_that_are_installed() -> None:
    versions = library_versions()
    assert set(versions) == {"torch", "transformers", "torchdata", "numpy", "kettle", "python"}
    assert versions["torch"] == importlib.metadata.version("torch")


def resolved_examples() -> dict[str, dict[str, object]]:
    configs = {path.name: load(path) for path in sorted(EXAMPLES.glob("*.toml"))}
    return {
        name: {
            "config": config.model_dump(mode="json"),
            "run_id_with_data_digest_0": run_id(config.name, identity_of(config)),
            "fingerprint_with_data_digest_0": identity_of(config),
        }
        for name, config in configs.items()
    }


def test_identity_of_every_example_is_the_one_in_the_golden_file() -> None:
    assert resolved_examples() == json.loads(GOLDEN.read_text(encoding="utf-8"))


if __name__ == "__main__":
    text = json.dumps(resolved_examples(), indent=2, sort_keys=True)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
