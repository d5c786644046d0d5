"""Every JSONL record: the one schema that writers and readers share.

A record is one line of JSON on stdout, flat, with `event` saying its kind. Readers ignore fields
they don't know and lines that are no records, so logs may be mixed with other output.
"""

import json
import sys
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kettle.exits import ExitCode


class _Record(BaseModel):
    # Non-finite numbers become the strings "NaN" and "Infinity": JSON has no others, and a null
    # would make the line unreadable, so that a step with overflowed gradients would look lost.
    model_config = ConfigDict(
        frozen=True, extra="ignore", protected_namespaces=(), ser_json_inf_nan="strings"
    )

    run_id: str = Field(description="`<name>-<12 hex of the fingerprint>`.")
    attempt_id: str = Field(description="Which launch of the run wrote this.")
    time_unix_s: float = Field(
        default_factory=time.time, description="Wall clock; for people, never for order."
    )


class RunStarted(_Record):
    """An attempt is about to take its first step."""

    event: Literal["run_started"] = "run_started"
    fingerprint: str = Field(
        description="SHA-256 of everything that changes what is computed, 64 hex."
    )
    resumed_from: int | None = Field(description="Step of the restored checkpoint, if any.")
    total_steps: int = Field(description="Steps at which the run is complete.")
    steps_per_epoch: int = Field(description="Whole global batches in one pass over the data.")
    world_size: int = Field(description="Ranks of this attempt.")
    virtual_ranks: int = Field(
        description="Data-parallel slots of the computation; the same in every attempt."
    )
    device_kind: str = Field(description="`cpu` or `cuda`.")
    generation: int | None = Field(
        default=None, description="Number of this attempt's claim in the run's log."
    )
    conditional_writes: Literal["enforced", "not_enforced"] | None = Field(
        default=None,
        description="Whether the store refused to create what exists, as seen by asking it.",
    )
    data_digest: str = Field(description="Digest of the data set that the run reads.")
    parameters: int = Field(description="Number of weights, a tied pair counted once.")
    checkpoint_prefix: str = Field(description="Folder or URI above all checkpoints of the run.")
    restore_ms: float | None = Field(description="Time to restore, where something was.")
    startup_s: float = Field(description="From process start to this record.")
    versions: dict[str, str] = Field(description="Library name to version, of what computes.")
    resource: dict[str, str] = Field(description="OpenTelemetry resource attributes.")


class Step(_Record):
    """One optimizer step was applied."""

    event: Literal["step"] = "step"
    step: int = Field(description="Counted from 1 over all attempts.")
    epoch: int = Field(description="Counted from 0.")
    loss: float = Field(description="Mean over the learned tokens of the global batch, in nats.")
    lr: float = Field(description="Learning rate that this step used.")
    grad_norm: float = Field(description="Euclidean norm before clipping.")
    tokens: int = Field(description="Learned tokens in the global batch.")
    tokens_per_s: float = Field(description="Learned tokens by the wall time of the step.")
    step_ms: float = Field(description="Wall time of the step.")
    world_size: int = Field(description="Ranks of this attempt.")
    sample_digest: str = Field(description="Which samples were consumed at which place, 16 hex.")
    rng_digest: str | None = Field(
        default=None, description="Where all random streams stand after the step, 16 hex."
    )
    weights_digest: str | None = Field(
        default=None,
        description="SHA-256 of the weights after the step, every `runtime.digest_every` steps.",
    )


class CheckpointCommitted(_Record):
    """A checkpoint has its marker."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int = Field(description="The last step that the checkpoint holds.")
    reason: Literal["schedule", "final", "preemption"] = Field(description="What asked for it.")
    checkpoint_uri: str = Field(description="Where it lies.")
    save_ms: float = Field(description="From the start of the save to the marker.")
    blocked_ms: float | None = Field(
        default=None, description="How long training stood still for it."
    )
    size_bytes: int = Field(description="All of its objects together.")


class CheckpointSkipped(_Record):
    """A checkpoint was passed over while looking for one to resume from."""

    event: Literal["checkpoint_skipped"] = "checkpoint_skipped"
    checkpoint_uri: str = Field(description="Where it lies.")
    reason: str = Field(description="What is wrong with it.")


class Alarm(_Record):
    """Something a person should look at; training goes on."""

    event: Literal["alarm"] = "alarm"
    kind: Literal["save_failed", "little_space", "conditional_writes_not_enforced"]
    step: int = Field(description="The last finished step.")
    message: str = Field(description="What is wrong, and what to do.")


class StopDecided(_Record):
    """All ranks agreed to stop."""

    event: Literal["stop_decided"] = "stop_decided"
    step: int = Field(description="The last finished step.")
    micro_batch: int = Field(description="Micro-batches of the next step that were dropped.")
    waited_ms: float | None = Field(description="From the earliest stop request to the agreement.")


class Preemption(_Record):
    """The attempt ends because it was told to."""

    event: Literal["preemption"] = "preemption"
    step: int | None = Field(description="The last finished step; None: training had not begun.")
    outcome: Literal["saved", "already_saved", "nothing_new", "not_saved"] = Field(
        description="saved: now; already_saved: by an earlier save; nothing_new: no step was "
        "taken; not_saved: the store failed, and the next attempt takes the last steps again."
    )
    checkpoint_uri: str | None = Field(description="What the next attempt will resume from.")
    save_ms: float | None = Field(description="Time of the save, where one was made.")
    grace_s: float = Field(description="Grace period that the platform promised.")
    grace_left_s: float | None = Field(
        description="What the save left of it; below 0 it was overdue."
    )
    exit_code: int = Field(description="What the process ends with.")


class RunCompleted(_Record):
    """The run reached `total_steps`."""

    event: Literal["run_completed"] = "run_completed"
    step: int = Field(description="The last finished step, which is `total_steps`.")
    weights_digest: str = Field(description="SHA-256 that no number of ranks changes.")
    exit_code: int = Field(description="What the process ends with.")
    wall_s: float = Field(description="Of this attempt.")


class RunFailed(_Record):
    """The attempt ends with an error."""

    event: Literal["run_failed"] = "run_failed"
    rank: int | None = Field(description="Which rank failed; None: the launcher says so.")
    error: str = Field(description="Class of the exception.")
    message: str = Field(description="What it says.")
    exit_code: int = Field(description="What the process ends with.")


Record = Annotated[
    RunStarted
    | Step
    | CheckpointCommitted
    | CheckpointSkipped
    | Alarm
    | StopDecided
    | Preemption
    | RunCompleted
    | RunFailed,
    Field(discriminator="event"),
]

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def left_before_start(
    *, run_id: str, attempt_id: str, grace_s: float, grace_left_s: float
) -> Preemption:
    """The record of an attempt that was told to stop before training began: nothing was lost."""
    return Preemption(
        run_id=run_id,
        attempt_id=attempt_id,
        step=None,
        outcome="nothing_new",
        checkpoint_uri=None,
        save_ms=None,
        grace_s=grace_s,
        grace_left_s=grace_left_s,
        exit_code=ExitCode.PREEMPTED,
    )


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
