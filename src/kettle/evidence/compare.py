"""Two checkpoints, tensor by tensor and bit by bit, without a process group."""

import math
import warnings
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import MARKER, METADATA, join
from kettle.checkpoint.marker import read_marker
from kettle.checkpoint.reader import CheckpointReader
from kettle.errors import CheckpointError, EvidenceError
from kettle.evidence.checks import Difference


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Origin(_Finding):
    """Where a checkpoint comes from, by its `_COMMIT`; null where that doesn't say."""

    run_id: str | None = None
    step: int | None = None


class TensorDifference(_Finding):
    """A tensor with the same layout and other bits."""

    name: str
    kind: Literal["floating", "integer"] = Field(
        description="integer: a random stream's words, a count or a position, where any difference "
        "is as wrong as any other."
    )
    differing_elements: int
    elements: int
    max_abs_difference: float = Field(
        description="Infinity where one side only is NaN, or infinities differ; 0 where nothing "
        "but the sign of a zero or the payload of a NaN differs."
    )


class LayoutDifference(_Finding):
    """A tensor whose shape or dtype differs, so that its values can't be compared."""

    name: str
    reference: str
    trial: str


class Comparison(_Finding):
    """What two checkpoints have in common. Printed by `kettle compare --json`."""

    reference_uri: str
    trial_uri: str
    reference: Origin
    trial: Origin
    tensors: int = Field(description="Tensors in both, with one layout, so compared.")
    differing: tuple[TensorDifference, ...] = Field(
        description="Floating-point tensors, then integer ones, each by largest difference."
    )
    only_in_reference: tuple[str, ...]
    only_in_trial: tuple[str, ...]
    layouts: tuple[LayoutDifference, ...]

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorator on a property
    @property
    def identical(self) -> bool:
        """Whether every tensor of either side is in the other with the same bits."""
        return self.same_tensors and not self.differing

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def largest_difference(self) -> float:
        """Largest absolute difference over all floating-point tensors compared."""
        floating = (t.max_abs_difference for t in self.differing if t.kind == "floating")
        return max(floating, default=0.0)

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def differing_integer_tensors(self) -> int:
        """How many random streams, counts and positions differ: no floor excuses one."""
        return sum(tensor.kind == "integer" for tensor in self.differing)

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def same_run(self) -> bool:
        """Whether both are of one run, or don't say; equality across runs proves something else."""
        return _agree(self.reference.run_id, self.trial.run_id)

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def same_step(self) -> bool:
        """Whether both are of one step, or don't say; only then should the tensors be equal."""
        return _agree(self.reference.step, self.trial.step)

    @property
    def same_tensors(self) -> bool:
        """Whether both sides hold the same names with the same layouts."""
        return not (self.only_in_reference or self.only_in_trial or self.layouts)


class ComparisonWithRecords(Comparison):
    """Two checkpoints and the records that led to them. `kettle compare --json` with records."""

    first_difference: Difference | None = Field(
        description="First step whose records differ; null: none that both runs have."
    )


Judgement = Literal["bit-identical", "within the floor", "broken"]


def compare(reference_uri: str, trial_uri: str) -> Comparison:
    """Compare all tensors of two committed checkpoints, the optimizer's and the RNG's too.

    Raises:
        EvidenceError: a checkpoint is missing, uncommitted, unreadable or holds anything but
            tensors.
    """
    reference, trial = _load(reference_uri), _load(trial_uri)
    differing: list[TensorDifference] = []
    layouts: list[LayoutDifference] = []
    shared = sorted(reference.keys() & trial.keys())
    for name in shared:
        ours, theirs = reference[name], trial[name]
        if _layout(ours) != _layout(theirs):
            layouts.append(
                LayoutDifference(name=name, reference=_layout(ours), trial=_layout(theirs))
            )
        elif not torch.equal(_bytes(ours), _bytes(theirs)):
            differing.append(_difference(name, ours, theirs))
    return Comparison(
        reference_uri=reference_uri,
        trial_uri=trial_uri,
        reference=_origin(reference_uri),
        trial=_origin(trial_uri),
        tensors=len(shared) - len(layouts),
        differing=tuple(sorted(differing, key=_rank)),
        only_in_reference=tuple(sorted(reference.keys() - trial.keys())),
        only_in_trial=tuple(sorted(trial.keys() - reference.keys())),
        layouts=tuple(layouts),
    )


def floor(reference_uri: str, again_uri: str) -> float:
    """The nondeterminism floor: the largest difference of two uninterrupted runs at one seed.

    Raises:
        EvidenceError: the two can't be compared, or differ in integers or by more than a finite
            figure; such a floor would excuse anything.
    """
    comparison = compare(reference_uri, again_uri)
    if (
        not comparison.same_tensors
        or comparison.differing_integer_tensors
        or not math.isfinite(comparison.largest_difference)
    ):
        raise EvidenceError(
            f"{reference_uri} and {again_uri} give no floor: they hold other tensors, or differ "
            "in integers or by infinity; use two finished runs of one experiment"
        )
    return comparison.largest_difference


def judge(comparison: Comparison, floor: float) -> Judgement:
    """Whether the trial equals the reference, to the bit or no worse than a second reference."""
    if comparison.identical:
        return "bit-identical"
    comparable = comparison.same_tensors and not comparison.differing_integer_tensors
    if comparable and comparison.largest_difference <= floor:
        return "within the floor"
    return "broken"


class _EverythingPlanner(DefaultLoadPlanner):
    """Loads whatever the checkpoint's metadata lists, without a model to load it into."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.tensors: dict[str, torch.Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the signature is torch's
    ) -> None:
        assert metadata is not None
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            self.tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        state_dict.update(self.tensors)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _load(uri: str) -> dict[str, torch.Tensor]:
    uri = uri.rstrip("/")
    _refuse_incomplete(uri)
    planner = _EverythingPlanner()
    filesystem, path = open_store(uri)
    try:
        with warnings.catch_warnings():
            # Said even where no_dist asks for exactly that.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            marker = read_marker(filesystem.cat_file(join(path, MARKER)), uri=uri)
            reader = CheckpointReader(filesystem, path, objects=marker.objects, uri=uri)
            load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointError as error:
        raise EvidenceError(f"{error}; compare another step of the run") from error
    except CheckpointException as error:
        causes = [wrapped[0] for wrapped in error.failures.values()]
        raise EvidenceError(
            f"can't read checkpoint {uri}: {causes[0]!r}; compare another step of the run"
        ) from error
    if not planner.tensors:
        # Two of these would be equal and prove nothing.
        raise EvidenceError(f"{uri} holds no tensor; name a checkpoint of a run")
    return planner.tensors


def _refuse_incomplete(uri: str) -> None:
    try:
        filesystem, path = open_store(uri)
        names = {entry.rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EvidenceError(
            f"there is no checkpoint at {uri}; name a folder such as "
            "ROOT/RUN_ID/step-00000060-ATTEMPT"
        ) from error
    except CheckpointError as error:
        raise EvidenceError(str(error)) from error
    except OSError as error:
        raise EvidenceError(f"can't look at {uri}: {error}; correct the URI") from error
    if MARKER not in names:
        raise EvidenceError(
            f"{uri} has no {MARKER}, so it is no whole checkpoint; name a committed step, one "
            f"level below the run's folder"
        )
    if METADATA not in names:
        raise EvidenceError(
            f"{uri} has a {MARKER} but no {METADATA}; it was damaged after its commit, so name "
            "another step"
        )


def _origin(uri: str) -> Origin:
    filesystem, path = open_store(uri.rstrip("/"))
    try:
        return Origin.model_validate_json(filesystem.cat_file(f"{path}/{MARKER}"))
    except ValidationError:
        return Origin()  # another version's marker; the tensors can be compared all the same


def _agree(ours: str | int | None, theirs: str | int | None) -> bool:
    return ours is None or theirs is None or ours == theirs


def _rank(difference: TensorDifference) -> tuple[str, float, str]:
    return difference.kind, -difference.max_abs_difference, difference.name


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Bytes, because equality of values finds NaN unequal to itself and 0.0 equal to -0.0.
    return tensor.reshape(-1).view(torch.uint8)


def _difference(name: str, reference: torch.Tensor, trial: torch.Tensor) -> TensorDifference:
    unequal_bytes = _bytes(reference) != _bytes(trial)
    differs = unequal_bytes.reshape(reference.numel(), reference.element_size()).any(dim=1)
    ours, theirs = reference.reshape(-1)[differs], trial.reshape(-1)[differs]
    return TensorDifference(
        name=name,
        kind="integer" if _is_integer(reference) else "floating",
        differing_elements=int(differs.sum()),
        elements=reference.numel(),
        max_abs_difference=_largest(ours, theirs),
    )


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if _is_integer(ours):
        # In Python's integers: neither overflow nor float64 may hide a difference of one.
        pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
        return float(max(abs(int(a) - int(b)) for a, b in pairs))
    wide = torch.complex128 if ours.is_complex() else torch.float64
    gap = (ours.to(wide) - theirs.to(wide)).abs()
    gap[ours.isnan() & theirs.isnan()] = 0.0
    return float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())
