import json
import math
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from kettle.errors import EvidenceError
from kettle.evidence.compare import Comparison, compare, floor, judge
from support.checkpoints import committed

State = dict[str, object]
Write = Callable[[str, State], str]


def tensors() -> dict[str, torch.Tensor]:
    """What a checkpoint of a very small run could hold; the same at each call."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model.embed.weight": torch.randn(7, 3, generator=generator),
        "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
        "optimizer.embed.weight.exp_avg": torch.randn(7, 3, generator=generator) * 1e-4,
        "optimizer.embed.weight.step": torch.tensor(12.0),
        "rng.vrank0.torch_cpu": generator.get_state(),
        "progress.step": torch.tensor(12),
        "loader.empty": torch.empty(0),
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda name, state: committed(tmp_path / name, state)


def compared(write: Write, name: str, reference: torch.Tensor, trial: torch.Tensor) -> Comparison:
    return compare(write("reference", {name: reference}), write("trial", {name: trial}))


def one_ulp_up(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.tensor(math.inf))


def test_the_same_state_is_bit_identical(write: Write) -> None:
    comparison = compare(write("reference", {**tensors()}), write("trial", {**tensors()}))
    assert comparison.identical
    assert comparison.tensors == len(tensors())
    assert judge(comparison, 0.0) == "bit-identical"


@pytest.mark.parametrize(
    "name", [name for name, tensor in tensors().items() if tensor.dtype is torch.float32][:3]
)
def test_one_ulp_in_one_element_is_found_by_name(write: Write, name: str) -> None:
    changed = tensors()
    flat = changed[name].reshape(-1)
    flat[0] = one_ulp_up(flat[0])
    comparison = compare(write("reference", {**tensors()}), write("trial", {**changed}))
    (difference,) = comparison.differing
    gap = float(flat[0].double() - tensors()[name].reshape(-1)[0].double())
    assert (difference.name, difference.differing_elements) == (name, 1)
    assert difference.max_abs_difference == comparison.largest_difference == gap > 0


def test_a_reference_perturbed_by_one_ulp_raises_the_floor_and_changes_the_verdict(
    write: Write,
) -> None:
    perturbed = tensors()
    perturbed["model.embed.weight"][2, 1] = one_ulp_up(perturbed["model.embed.weight"][2, 1])
    reference = write("reference", {**tensors()})
    again = write("again", {**tensors()})
    moved = write("moved", {**perturbed})
    assert floor(reference, again) == 0.0
    assert floor(reference, moved) > 0.0
    trial = compare(reference, moved)
    assert judge(trial, floor(reference, again)) == "broken"
    assert judge(trial, floor(reference, moved)) == "within the floor"


def test_nan_with_the_same_bits_is_the_same(write: Write) -> None:
    value = torch.tensor([1.0, math.nan])
    assert compared(write, "x", value, value.clone()).identical


def test_nan_on_one_side_differs_by_infinity(write: Write) -> None:
    comparison = compared(write, "x", torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]))
    assert comparison.largest_difference == math.inf
    assert judge(comparison, 1e9) == "broken"


def test_the_sign_of_a_zero_is_a_difference_of_bits(write: Write) -> None:
    comparison = compared(write, "x", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not comparison.identical
    assert comparison.largest_difference == 0.0


def test_rng_bytes_are_compared_as_numbers(write: Write) -> None:
    before, after = torch.tensor([3, 250], dtype=torch.uint8), torch.tensor([250, 250])
    comparison = compared(write, "rng.vrank0.python", before, after.to(torch.uint8))
    assert [tensor.max_abs_difference for tensor in comparison.differing] == [247.0]


def test_integers_are_counted_and_are_no_part_of_the_largest_difference(write: Write) -> None:
    words, weights = torch.tensor([3, 250]), torch.tensor([1.0, 2.0])
    reference = write("reference", {"rng": words, "step": torch.tensor(4), "w": weights})
    other: State = {"rng": words + 7, "step": torch.tensor(5), "w": weights + 0.5}
    comparison = compare(reference, write("trial", other))
    assert comparison.largest_difference == 0.5
    assert comparison.differing_integer_tensors == 2
    assert [(tensor.name, tensor.kind) for tensor in comparison.differing] == [
        ("w", "floating"),
        ("rng", "integer"),
        ("step", "integer"),
    ]


def test_a_run_of_which_only_a_random_stream_differs_is_broken_whatever_the_floor(
    write: Write,
) -> None:
    changed = tensors()
    changed["rng.vrank0.torch_cpu"][0] ^= 1
    comparison = compare(write("reference", {**tensors()}), write("trial", {**changed}))
    assert comparison.largest_difference == 0.0
    assert not comparison.identical
    assert judge(comparison, 1e9) == "broken"


@pytest.mark.parametrize("value", [-(2**63), -1, 2**53, 2**63 - 2])
def test_a_difference_of_one_in_a_big_integer_is_seen(write: Write, value: int) -> None:
    comparison = compared(write, "x", torch.tensor([value]), torch.tensor([value + 1]))
    assert [tensor.max_abs_difference for tensor in comparison.differing] == [1.0]


def test_a_difference_of_integers_does_not_overflow(write: Write) -> None:
    comparison = compared(write, "x", torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]))
    assert [tensor.max_abs_difference for tensor in comparison.differing] == [2.0**64]


def test_differing_tensors_come_with_the_largest_difference_first(write: Write) -> None:
    reference = write("reference", {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    changed: State = {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.tensor([0.0, 5.0])}
    comparison = compare(reference, write("trial", changed))
    assert [tensor.name for tensor in comparison.differing] == ["c", "a"]


def test_keys_on_one_side_only_are_named(write: Write) -> None:
    reference = write("reference", {"both": torch.ones(1), "gone": torch.ones(1)})
    comparison = compare(reference, write("trial", {"both": torch.ones(1), "new": torch.ones(1)}))
    assert (comparison.only_in_reference, comparison.only_in_trial) == (("gone",), ("new",))
    assert judge(comparison, math.inf) == "broken"


@pytest.mark.parametrize(
    ("other", "layout"),
    [(torch.ones(3, 2), "float32[3, 2]"), (torch.ones(2, 3, dtype=torch.float64), "float64[2, 3]")],
)
def test_another_shape_or_dtype_is_named(write: Write, other: torch.Tensor, layout: str) -> None:
    comparison = compared(write, "x", torch.ones(2, 3), other)
    (difference,) = comparison.layouts
    assert (difference.reference, difference.trial) == ("float32[2, 3]", layout)
    assert comparison.tensors == 0
    assert not comparison.identical


def test_a_comparison_survives_json_with_infinity(write: Write) -> None:
    comparison = compared(write, "x", torch.tensor([1.0]), torch.tensor([math.inf]))
    text = comparison.model_dump_json()
    assert '"largest_difference":"Infinity"' in text
    assert Comparison.model_validate_json(text) == comparison


def test_a_uri_may_have_a_scheme_and_a_trailing_slash(write: Write) -> None:
    reference = write("reference", {**tensors()})
    assert compare(reference, f"file://{reference}/").identical


def test_references_with_other_tensors_give_no_floor(write: Write) -> None:
    with pytest.raises(EvidenceError, match="give no floor"):
        floor(write("reference", {"a": torch.ones(1)}), write("again", {"b": torch.ones(1)}))


def test_references_that_differ_in_integers_give_no_floor(write: Write) -> None:
    with pytest.raises(EvidenceError, match="give no floor"):
        floor(
            write("reference", {"a": torch.tensor([1])}), write("again", {"a": torch.tensor([2])})
        )


@pytest.mark.parametrize(
    ("facts", "same_run", "same_step"),
    [
        ({"run_id": "tiny-0b77c1d2aa90", "step": 9}, True, True),
        ({"run_id": "tiny-ae5bc7e54e1a", "step": 9}, False, True),
        ({"run_id": "tiny-0b77c1d2aa90", "step": 6}, True, False),
    ],
)
def test_checkpoints_of_other_runs_and_steps_are_told_and_compared_all_the_same(
    write: Write,
    facts: dict[str, object],
    same_run: bool,  # noqa: FBT001 - a case of the table
    same_step: bool,  # noqa: FBT001 - as above
) -> None:
    reference = write("reference", {**tensors()})
    trial = write("trial", {**tensors()})
    mark(reference, {"run_id": "tiny-0b77c1d2aa90", "step": 9})
    mark(trial, facts)
    comparison = compare(reference, trial)
    assert (comparison.same_run, comparison.same_step) == (same_run, same_step)
    assert comparison.trial.model_dump() == facts
    assert comparison.identical


def mark(uri: str, facts: dict[str, object]) -> None:
    """Put other facts into the marker of a checkpoint."""
    marker = Path(uri) / "_COMMIT"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **facts}))


def test_a_missing_checkpoint_is_refused_by_name(write: Write, tmp_path: Path) -> None:
    reference = write("reference", {**tensors()})
    with pytest.raises(EvidenceError, match=r"no checkpoint at .*absent; name a folder"):
        compare(reference, str(tmp_path / "absent"))


def test_a_checkpoint_without_its_marker_is_refused_by_name(write: Write) -> None:
    reference = write("reference", {**tensors()})
    (Path(reference) / "_COMMIT").unlink()
    with pytest.raises(EvidenceError, match="reference has no _COMMIT"):
        compare(reference, reference)


def test_a_checkpoint_without_metadata_is_refused_by_name(write: Write) -> None:
    reference = write("reference", {**tensors()})
    (Path(reference) / "metadata.json").unlink()
    with pytest.raises(EvidenceError, match=r"reference has a _COMMIT but no metadata\.json"):
        compare(reference, reference)


def test_a_checkpoint_that_lost_a_shard_is_refused_by_name(write: Write) -> None:
    reference = write("reference", {**tensors()})
    next(Path(reference).glob("*.distcp")).unlink()
    with pytest.raises(EvidenceError, match=r"can't read checkpoint .*reference"):
        compare(reference, reference)


def test_a_checkpoint_with_a_flipped_bit_is_refused_by_name(write: Write) -> None:
    reference = write("reference", {**tensors()})
    shard = next(Path(reference).glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[11] ^= 1
    shard.write_bytes(content)
    with pytest.raises(EvidenceError, match=r"can't read checkpoint .*reference.*__0_0\.distcp"):
        compare(reference, reference)


def test_an_unknown_scheme_is_refused_by_name(write: Write) -> None:
    with pytest.raises(EvidenceError, match="can't open nowhere://x"):
        compare(write("reference", {**tensors()}), "nowhere://x")


def test_a_checkpoint_without_a_tensor_proves_nothing_and_is_refused(write: Write) -> None:
    empty = write("empty", {})
    with pytest.raises(EvidenceError, match="empty holds no tensor"):
        compare(empty, empty)


def test_a_checkpoint_in_an_object_store_is_compared_by_its_uri(write: Write) -> None:
    reference = write("reference", {**tensors()})
    store = fsspec.filesystem("memory")
    store.put(reference, "/compare/copy", recursive=True)
    assert compare(reference, "memory://compare/copy").identical
