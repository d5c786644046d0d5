"""Records of made-up runs, for readers of evidence."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from kettle.records import (
    Alarm,
    CheckpointCommitted,
    Preemption,
    Record,
    RunCompleted,
    RunFailed,
    RunStarted,
    Step,
)

RUN_ID = "made-up-0123456789ab"


def started(
    attempt: str,
    *,
    resumed_from: int | None = None,
    total_steps: int = 12,
    fingerprint: str = "f" * 64,
    at_s: float = 0.0,
    run_id: str = RUN_ID,
) -> Record:
    return RunStarted(
        run_id=run_id,
        attempt_id=attempt,
        time_unix_s=at_s,
        fingerprint=fingerprint,
        resumed_from=resumed_from,
        total_steps=total_steps,
        steps_per_epoch=5,
        world_size=1,
        virtual_ranks=1,
        device_kind="cpu",
        data_digest="d" * 64,
        parameters=7,
        checkpoint_prefix=f"/checkpoints/{run_id}",
        restore_ms=None,
        startup_s=1.0,
        versions={},
        resource={},
    )


def step(
    attempt: str,
    number: int,
    *,
    loss: float | None = None,
    lr: float = 1e-3,
    grad_norm: float = 1.0,
    sample_digest: str | None = None,
    at_s: float = 0.0,
) -> Record:
    return Step(
        run_id=RUN_ID,
        attempt_id=attempt,
        time_unix_s=at_s,
        step=number,
        epoch=(number - 1) // 5,
        loss=5.0 / number if loss is None else loss,
        lr=lr,
        grad_norm=grad_norm,
        tokens=64,
        tokens_per_s=640.0,
        step_ms=100.0,
        world_size=1,
        sample_digest=f"{number:016x}" if sample_digest is None else sample_digest,
    )


def preempted(attempt: str, number: int | None, *, at_s: float = 0.0) -> Record:
    return Preemption(
        run_id=RUN_ID,
        attempt_id=attempt,
        time_unix_s=at_s,
        step=number,
        outcome="nothing_new" if number is None else "saved",
        checkpoint_uri=None if number is None else f"/checkpoints/{RUN_ID}/step-{number:08d}",
        save_ms=None if number is None else 42.0,
        grace_s=30.0,
        grace_left_s=29.5,
        exit_code=75,
    )


def committed(attempt: str, number: int) -> Record:
    return CheckpointCommitted(
        run_id=RUN_ID,
        attempt_id=attempt,
        time_unix_s=0.0,
        step=number,
        reason="schedule",
        checkpoint_uri=f"/checkpoints/{RUN_ID}/step-{number:08d}",
        save_ms=40.0,
        size_bytes=1000,
    )


def completed(attempt: str, number: int) -> Record:
    return RunCompleted(
        run_id=RUN_ID,
        attempt_id=attempt,
        time_unix_s=0.0,
        step=number,
        weights_digest="w" * 64,
        exit_code=0,
        wall_s=9.0,
    )


def failed(attempt: str, *, rank: int | None = 0) -> Record:
    return RunFailed(
        run_id=RUN_ID,
        attempt_id=attempt,
        time_unix_s=0.0,
        rank=rank,
        step=3,
        error="InjectedFailure",
        message="on purpose",
        exit_code=1,
    )


def interrupted_run(*boundaries: int) -> list[list[Record]]:
    """The records of each attempt; `interrupted_run(4, 9, 12)` is evicted after steps 4 and 9."""
    total_steps = boundaries[-1]
    attempts: list[list[Record]] = []
    for number, (before, last) in enumerate(pairwise((0, *boundaries)), start=1):
        name, at_s = f"attempt-{number}", 100.0 * number
        origin = before or None
        log: list[Record] = [started(name, resumed_from=origin, total_steps=total_steps, at_s=at_s)]
        log += [step(name, n, at_s=at_s + n) for n in range(before + 1, last + 1)]
        if last < total_steps:
            log.append(preempted(name, last, at_s=at_s + 50.0))
        else:
            log += [committed(name, last), completed(name, last)]
        attempts.append(log)
    return attempts


def flat(attempts: Iterable[Sequence[Record]]) -> list[Record]:
    return [record for log in attempts for record in log]


def write_log(path: Path, records: Iterable[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record.model_dump_json() + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def not_saved(attempt: str, number: int, *, saved: int) -> list[Record]:
    """An eviction after a step that could not be saved; an older one had been."""
    uri = f"/checkpoints/{RUN_ID}/step-{saved:08d}"
    alarm = Alarm(
        run_id=RUN_ID, attempt_id=attempt, kind="save_failed", step=number, message="disk full"
    )
    end = Preemption(
        run_id=RUN_ID,
        attempt_id=attempt,
        step=number,
        outcome="not_saved",
        checkpoint_uri=uri,
        save_ms=None,
        grace_s=30.0,
        grace_left_s=29.5,
        exit_code=74,
    )
    return [alarm, end]
