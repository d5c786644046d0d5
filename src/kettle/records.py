"""Every JSONL record: the one schema that writers and readers share.

A record is one line of JSON on stdout, flat, with `event` saying its kind. Readers ignore fields
they don't know and lines that are no records, so logs may be mixed with other output.
"""

import json
import sys
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    run_id: str = Field(description="`<name>-<12 hex of the fingerprint>`.")
    attempt_id: str = Field(description="Which launch of the run wrote this.")
    time_unix_s: float = Field(
        default_factory=time.time, description="Wall clock; for people, never for order."
    )


class RunStarted(_Record):
    """An attempt is about to take its first step."""

    event: Literal["run_started"] = "run_started"
    fingerprint: str
    resumed_from: int | None = Field(description="Step of the restored checkpoint, if any.")
    total_steps: int
    steps_per_epoch: int
    world_size: int
    virtual_ranks: int
    device_kind: str
    data_digest: str
    parameters: int = Field(description="Number of weights, a tied pair counted once.")
    checkpoint_prefix: str
    restore_ms: float | None = Field(description="Time to restore, where something was.")
    startup_s: float = Field(description="From process start to this record.")
    versions: dict[str, str]
    resource: dict[str, str] = Field(description="OpenTelemetry resource attributes.")


class Step(_Record):
    """One optimizer step was applied."""

    event: Literal["step"] = "step"
    step: int = Field(description="Counted from 1 over all attempts.")
    epoch: int = Field(description="Counted from 0.")
    loss: float = Field(description="Mean over the learned tokens of the global batch, in nats.")
    lr: float
    grad_norm: float = Field(description="Euclidean norm before clipping.")
    tokens: int = Field(description="Learned tokens in the global batch.")
    tokens_per_s: float
    step_ms: float
    world_size: int
    sample_digest: str = Field(description="Which samples were consumed at which place, 16 hex.")


class CheckpointCommitted(_Record):
    """A checkpoint has its marker."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int
    reason: Literal["schedule", "final", "preemption"]
    checkpoint_uri: str
    save_ms: float
    size_bytes: int


class CheckpointSkipped(_Record):
    """A checkpoint was passed over while looking for one to resume from."""

    event: Literal["checkpoint_skipped"] = "checkpoint_skipped"
    checkpoint_uri: str
    reason: str


class StopDecided(_Record):
    """All ranks agreed to stop."""

    event: Literal["stop_decided"] = "stop_decided"
    step: int = Field(description="The last finished step.")
    micro_batch: int = Field(description="Micro-batches of the next step that were dropped.")
    waited_ms: float | None = Field(description="From this rank's stop request to the agreement.")


class Preemption(_Record):
    """The attempt ends because it was told to."""

    event: Literal["preemption"] = "preemption"
    step: int | None = Field(description="The last finished step; None: training had not begun.")
    outcome: Literal["saved", "already_saved", "nothing_new"]
    checkpoint_uri: str | None = Field(description="What the next attempt will resume from.")
    save_ms: float | None
    grace_s: float
    grace_left_s: float | None
    exit_code: int


class RunCompleted(_Record):
    """The run reached `total_steps`."""

    event: Literal["run_completed"] = "run_completed"
    step: int
    weights_digest: str = Field(description="SHA-256 that no number of ranks changes.")
    exit_code: int
    wall_s: float = Field(description="Of this attempt.")


class RunFailed(_Record):
    """The attempt ends with an error."""

    event: Literal["run_failed"] = "run_failed"
    rank: int | None = Field(description="Which rank failed; None: the launcher says so.")
    step: int | None
    error: str
    message: str
    exit_code: int


Record = Annotated[
    RunStarted
    | Step
    | CheckpointCommitted
    | CheckpointSkipped
    | StopDecided
    | Preemption
    | RunCompleted
    | RunFailed,
    Field(discriminator="event"),
]

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def emit(record: Record) -> None:
    """Write one line to stdout and flush it, so that a killed process loses no record."""
    sys.stdout.write(record.model_dump_json() + "\n")
    sys.stdout.flush()


def parse_line(line: str) -> Record | None:
    """The record in a line, or None for any other line or for an event that is not known."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a line."""
    schema = _ADAPTER.json_schema(mode="serialization")
    return json.loads(json.dumps(schema, sort_keys=True))  # type: ignore[no-any-return]
