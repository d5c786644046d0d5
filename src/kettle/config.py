"""The run file: frozen, strict sections, and how a file and `--set` become one `RunConfig`.

Whatever stands in `experiment` changes what is computed and is part of the fingerprint; nothing
else is. So a field's section, not a tag on it, decides whether changing it makes another run.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from kettle.errors import ConfigError

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: no unknown key, no coercion, no change after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(Section):
    """A Qwen2 architecture with random initial weights."""

    vocab_size: PositiveInt = Field(description="Rows of the embedding. Byte tokens need 257.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream.")
    intermediate_size: PositiveInt = Field(description="Width inside the MLP.")
    layers: PositiveInt = Field(description="Number of decoder layers.")
    heads: PositiveInt = Field(description="Attention heads; divides hidden_size.")
    kv_heads: PositiveInt = Field(description="Key and value heads; divides heads.")
    tie_embeddings: bool = Field(
        description="Use the embedding as output head too, as Qwen2.5-0.5B does."
    )
    attention_dropout: Fraction = Field(
        description="Probability with which an attention weight is dropped while training."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"heads = {self.heads} does not divide hidden_size = {self.hidden_size}; "
                "choose a divisor"
            )
        if (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size / heads = {self.hidden_size // self.heads} is odd, "
                "and rotary positions need an even head width; choose another number of heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; choose a divisor"
            )
        return self


class DataConfig(Section):
    """Where the text comes from and how it is cut into samples."""

    source: Literal["stdlib", "text"] = Field(
        description="stdlib: the source files of this Python's standard library. "
        "text: the files that runtime.data_path names."
    )
    include: str = Field(
        default="*.py",
        pattern=r"^[^/]",
        description="Which files below a folder are read; `**` crosses folders.",
    )
    tokenizer: Literal["bytes"] = Field(
        default="bytes", description="bytes: one token a byte, and token 256 between documents."
    )
    sequence_length: Annotated[int, Field(ge=2)] = Field(
        description="Tokens that the model sees in a sample."
    )
    max_samples: PositiveInt | None = Field(
        default=None, description="Use only this many samples from the beginning; None: all."
    )


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat = Field(description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        description="How the rate falls from the end of the warm-up to the last step."
    )
    warmup_steps: NonNegativeInt = Field(description="Steps over which the rate rises from 0.")
    min_lr_ratio: Fraction = Field(
        default=0.0, description="Where the schedule ends, as a part of the peak."
    )
    beta1: Fraction = Field(default=0.9, description="Decay of the first moment.")
    beta2: Fraction = Field(default=0.999, description="Decay of the second moment.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="Decoupled decay of matrices; norms and biases are exempt."
    )
    max_grad_norm: PositiveFloat = Field(
        default=1.0, description="Gradients are scaled down to this Euclidean norm."
    )


class ExperimentConfig(Section):
    """Everything that changes what is computed. All of it is in the fingerprint."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        description="Seeds the weights, the sample order and all streams."
    )
    total_steps: PositiveInt = Field(description="Optimizer steps of the whole run.")
    virtual_ranks: PositiveInt = Field(
        description="Data-parallel slots of the computation; 1 to this many ranks may host them."
    )
    micro_batch: PositiveInt = Field(description="Samples in one forward and backward pass.")
    accumulation: PositiveInt = Field(
        default=1, description="Micro-batches per virtual rank and step."
    )
    reduction: Literal["canonical", "native"] = Field(
        default="canonical",
        description="canonical: gradients are summed in an order that no number of ranks changes. "
        "native: the collective library's own order (tier 2).",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of weights and activations in the passes; parameters stay float32.",
    )
    threads: PositiveInt = Field(
        default=1, description="Intra-op CPU threads of a rank; results may depend on it."
    )
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig

    @property
    def global_batch(self) -> int:
        """Samples that one step consumes over all virtual ranks."""
        return self.virtual_ranks * self.accumulation * self.micro_batch

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.optim.warmup_steps > self.total_steps:
            raise ValueError(
                f"optim.warmup_steps = {self.optim.warmup_steps} is more than "
                f"total_steps = {self.total_steps}; shorten the warm-up or lengthen the run"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab_size < BYTE_VOCABULARY:
            raise ValueError(
                f"model.vocab_size = {self.model.vocab_size} is too small for byte tokens; "
                f"use at least {BYTE_VOCABULARY}"
            )
        return self


BYTE_VOCABULARY = 257


class CheckpointConfig(Section):
    """Where checkpoints go and which are kept."""

    root: str = Field(
        min_length=1,
        description="Folder or URI (file://, s3://, gs://) above the run's own prefix.",
    )
    every: PositiveInt | None = Field(
        default=None, description="Save after every this many steps; None: only when evicted."
    )
    periodic: Literal["sync", "async"] = Field(
        default="sync",
        description="Whether training waits for a periodic save, or goes on while a copy in host "
        "memory, as large as the rank's share of the state, is written.",
    )
    keep: PositiveInt = Field(default=3, description="How many committed checkpoints are kept.")
    keep_every: PositiveInt | None = Field(
        default=None, description="Keep those of every this many steps as well, for good."
    )
    verify: Literal["digests", "sizes"] = Field(
        default="digests",
        description="What a restore compares with the marker: every byte that it reads, or sizes "
        "alone.",
    )
    debris_hours: NonNegativeFloat = Field(
        default=1.0,
        description="How long nothing was written to what a killed save has left before it is "
        "deleted.",
    )
    quarantine_after: PositiveInt = Field(
        default=3,
        description="Set a checkpoint aside once this many attempts in a row have crashed from "
        "it at the same step.",
    )


class RuntimeConfig(Section):
    """Facts about where the run runs."""

    grace_seconds: PositiveFloat = Field(
        default=30.0,
        description="Seconds between SIGTERM and SIGKILL; KETTLE_GRACE goes before it.",
    )
    data_path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='A file, a folder or a glob, for source = "text"; a relative one starts at '
        "the working directory. Where the text lies makes no other run; what it says does.",
    )
    loader_workers: NonNegativeInt = Field(
        default=0, description="Processes per rank that read samples ahead."
    )
    digest_every: PositiveInt = Field(
        default=100,
        description="Every this many steps the record holds a digest of the weights.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA where there is one device for every worker."
    )
    exchange: Literal["auto", "round", "step"] = Field(
        default="auto",
        description="When canonical gradients travel: every round (least memory) or once a step "
        "(least traffic; only where virtual_ranks / workers is a power of two). Same bits.",
    )
    timeout_seconds: Annotated[float, Field(gt=0, le=7 * 86400)] = Field(
        default=600.0, description="After this long in one collective a rank gives up."
    )


Name = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=40, examples=["stdlib-tiny"])
]


class RunConfig(Section):
    """A whole run file."""

    name: Name = Field(description="First half of the run id: lower case letters, digits, hyphens.")
    experiment: ExperimentConfig
    checkpoint: CheckpointConfig
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _path_fits_source(self) -> Self:
        source, path = self.experiment.data.source, self.runtime.data_path
        if source == "text" and path is None:
            raise ValueError(
                'experiment.data.source = "text" needs runtime.data_path; '
                "name a file, a folder or a glob"
            )
        if source == "stdlib" and path is not None:
            raise ValueError(
                f'runtime.data_path = {path!r} is not used with experiment.data.source = "stdlib"; '
                'leave it out, or set the source to "text"'
            )
        return self


class DeploymentFacts(Section):
    """What the platform says through environment variables. No field of it is hashed."""

    grace_seconds: float | None
    s3_endpoint: str | None
    workers: int | None
    attempt_id: str | None


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `section.key=value` overrides.

    Raises:
        ConfigError: the file can't be read or parsed, or a field is unknown, of a wrong type or in
            conflict with another. The message lists every fault with its dotted path.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read run file {path}: {error.strerror or error}") from error
    except ValueError as error:  # bad TOML, bad UTF-8, or a number beyond all bounds
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    return parse(tree, origin=str(path))


def parse(tree: dict[str, Any], *, origin: str) -> RunConfig:
    """Validate a nested mapping; `origin` is named in errors. Raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join([f"{origin} can't be used as it is:", *lines])) from error


def deployment_facts() -> DeploymentFacts:
    """Read the `KETTLE_*` variables; the only place that does. Raises ConfigError."""
    return DeploymentFacts(
        grace_seconds=_positive("KETTLE_GRACE"),
        s3_endpoint=os.environ.get("KETTLE_S3_ENDPOINT") or None,
        workers=_whole("KETTLE_WORKERS"),
        attempt_id=os.environ.get("KETTLE_ATTEMPT_ID") or None,
    )


def _positive(variable: str) -> float | None:
    text = os.environ.get(variable, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{variable} = {text!r} is not a positive number; set one or unset it")
    return value


def _whole(variable: str) -> int | None:
    value = _positive(variable)
    if value is not None and not value.is_integer():
        raise ConfigError(f"{variable} = {value!r} is not a whole number; set one or unset it")
    return None if value is None else int(value)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"--set {override!r} is not KEY=VALUE; write for example "
            "--set experiment.total_steps=100"
        )
    *sections, last = path
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {section} is a value, not a section")
    node[last] = _toml_value(text)


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text  # a bare word, so that no one has to quote a path twice


def _explain(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "run file"
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"  {where}: unknown key (value {value!r}); {_suggestion(detail['loc'])}"
        case "missing":
            return f"  {where}: is missing; add it"
        case "value_error":
            return f"  {where}: {detail['ctx']['error']}"
        case "model_type" | "model_attributes_type":
            return f"  {where} = {value!r}: is a section, no value; write it as [{where}]"
        case _:
            fault = detail["msg"][0].lower() + detail["msg"][1:]
            return f"  {where} = {value!r}: {fault}; correct the value"


def _suggestion(location: Iterable[int | str]) -> str:
    *sections, key = location
    node: type[BaseModel] = RunConfig
    for section in sections:
        annotation = node.model_fields[str(section)].annotation
        assert isinstance(annotation, type)
        node = annotation
    known = list(node.model_fields)
    close = difflib.get_close_matches(str(key), known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(known)}"
