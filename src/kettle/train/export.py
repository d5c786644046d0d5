"""The model of a checkpoint as a folder that `from_pretrained` loads."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from fsspec import AbstractFileSystem
from pydantic import ValidationError
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.utils import CONFIG_NAME

from kettle.checkpoint.contents import StoredTensors
from kettle.checkpoint.export import write_safetensors
from kettle.checkpoint.marker import Marker
from kettle.config import ModelConfig
from kettle.errors import CheckpointError, UsageError
from kettle.model.build import architecture, build_model

PART = "model"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE_SHAPE = (2, 32)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: names of those with weights.
        largest_logit_difference: what rounding costs on the probe batch; None: nothing was rounded.
    """

    files: list[str]
    parameters: int
    size_bytes: int
    largest_logit_difference: float | None


def export_model(
    filesystem: AbstractFileSystem,
    folder: str,
    *,
    marker: Marker,
    uri: str,
    out: Path,
    dtype: Literal["float32", "bfloat16"],
    progress: Callable[[int], None],
) -> Exported:
    """Write the model of a checkpoint into a new folder: all of it, or nothing.

    Args:
        uri: the checkpoint, as a message names it.
        out: doesn't exist, or is empty.
        dtype: of the weights; kettle trains float32.
        progress: told how many bytes of the checkpoint were read.

    Raises:
        UsageError: the folder isn't empty, or can't be made.
        TornCheckpointError: the bytes are not what the marker says.
        CheckpointError: the checkpoint holds another model than it says.
        OSError: the store can't be read, or the folder not written to.
    """
    refuse_taken(out)
    config = _model_config(marker, uri=uri)
    stored = StoredTensors(filesystem, folder, marker=marker, uri=uri)
    parameters = _check_model(stored, config)
    with _whole_or_not_at_all(out) as partial:
        files = write_safetensors(
            stored, partial, part=PART, dtype=_DTYPES[dtype], progress=progress
        )
        _write_config(config, partial, dtype=dtype)
        for file in files:
            # safetensors gives them to their owner alone.
            shutil.copymode(partial / CONFIG_NAME, partial / file)
        difference = None
        if dtype != "float32":
            difference = _largest_logit_difference(stored, config, _DTYPES[dtype])
        size_bytes = sum((partial / file).stat().st_size for file in files)
    return Exported(files, parameters, size_bytes, difference)


def refuse_taken(out: Path) -> None:
    """Raise UsageError where a folder would not be new."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is not an empty folder; name one that doesn't exist yet")


def _model_config(marker: Marker, *, uri: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(marker.experiment.get("model"))
    except ValidationError as error:
        raise CheckpointError(
            f"{uri}: the marker's experiment.model can't be understood: "
            f"{error.errors(include_url=False)[0]['msg']}; use the version of kettle that wrote it"
        ) from error


def _check_model(stored: StoredTensors, config: ModelConfig) -> int:
    """Compare what is stored with what such a model consists of; its number of parameters."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(architecture(config))
    # A tied weight is in it once, under its first name, and so it is in a checkpoint.
    expected = {name: tensor.shape for name, tensor in model.named_parameters()}
    found = {name: entry.size for name, entry in stored.of_part(PART).items()}
    if found != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise CheckpointError(
            f"{stored.uri} holds another model than its marker says, beginning with {wrong[0]}: "
            f"found {found.get(wrong[0])}, expected {expected.get(wrong[0])}; "
            "use the version of kettle that wrote it"
        )
    return sum(shape.numel() for shape in expected.values())


def _write_config(config: ModelConfig, folder: Path, *, dtype: str) -> None:
    described = architecture(config)
    described.architectures = [Qwen2ForCausalLM.__name__]
    described.dtype = dtype
    described.use_cache = True  # nobody generates while training, but with this model one does
    described.save_pretrained(folder)


def _largest_logit_difference(
    stored: StoredTensors, config: ModelConfig, dtype: torch.dtype
) -> float:
    """What rounding changes, on tokens that are always the same.

    The weights are rounded one by one: loading the folder beside the model would take half of its
    size once more.
    """
    model = build_model(config, seed=0).eval()
    for name, parameter in model.named_parameters():
        stored.read_into(parameter.detach(), part=PART, name=name)
    exact = probe_logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.detach().to(dtype)
    return float((probe_logits(model) - exact).abs().max())


def probe_logits(model: Qwen2ForCausalLM) -> torch.Tensor:
    """What a model says to the probe batch, as float32."""
    count = _PROBE_SHAPE[0] * _PROBE_SHAPE[1]
    # Spread over the vocabulary by a prime; random ones could differ from one torch to the next.
    tokens = torch.arange(count).mul(7919).remainder(model.config.vocab_size).view(_PROBE_SHAPE)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


@contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A folder beside the one asked for, which takes its name at the end."""
    out = out.resolve()
    partial = out.parent / f".{out.name}.{uuid.uuid4().hex[:12]}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"can't make a folder in {out.parent}: {error.strerror}; name another one"
        ) from error
    try:
        yield partial
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
