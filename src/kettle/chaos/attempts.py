"""One attempt of a reference or of the trial, from its start to the exit status it must have."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kettle.chaos.folder import Side
from kettle.chaos.follow import Attempt, launch_command, started
from kettle.chaos.triggers import Trigger
from kettle.exits import ExitCode
from kettle.records import Preemption, Record, RunStarted, Step

_STARTUP_S = 120.0
"""How long a launcher may be silent beyond its own collective timeout: imports, data, restore."""

_STOP_MARGIN_S = 30.0
"""How long after its grace period an attempt may still be ending before it counts as hung."""

_EXIT_S = 30.0
"""How long a launcher may live on after the last of its output."""


class Progress(Protocol):
    """Told where the drive is; shows it to a person."""

    def phase(self, title: str, *, total_steps: int | None = None) -> None:
        """Something new begins, of this many steps where it has steps."""

    def step(self, step: int) -> None:
        """The phase has reached a step."""


@dataclass(frozen=True)
class Launches:
    """What all attempts of a chaos run have in common.

    Attributes:
        overrides: the `--set` values of the command line.
        stop_s: how long an attempt may take from its eviction to its end.
        silence_s: how long an attempt may write nothing before it counts as hung.
    """

    run_file: Path
    overrides: tuple[str, ...]
    total_steps: int
    stop_s: float
    silence_s: float
    progress: Progress

    def start(self, side: Side, *, attempt: int, workers: int) -> AbstractContextManager[Attempt]:
        """Start an attempt (counted from 1) of one side, under that side's checkpoint root."""
        # JSON's string is TOML's too, whatever characters the path has. Last, so that it holds.
        root = json.dumps(side.checkpoint_root, ensure_ascii=False)
        overrides = (*self.overrides, f"checkpoint.root={root}")
        return started(
            launch_command(self.run_file, workers=workers, overrides=overrides),
            name=f"attempt {attempt} of the {side.title}",
            log=side.log(attempt),
            errors=side.errors(attempt),
        )


def silence_limit_s(collective_timeout_s: float) -> float:
    """How long a healthy attempt may write nothing."""
    return collective_timeout_s + _STARTUP_S


def stop_limit_s(grace_s: float) -> float:
    """How long an attempt may take to end, where the platform allows `grace_s` seconds."""
    return grace_s + _STOP_MARGIN_S


def run_to_completion(
    launches: Launches, side: Side, *, attempt: int, workers: int, resumes_after: int | None
) -> None:
    """Run an attempt that nobody evicts; `resumes_after` as in `run_until_evicted`.

    Raises:
        KettleError: it hangs, began anew, or doesn't end with exit code 0.
    """
    with launches.start(side, attempt=attempt, workers=workers) as process:
        for _ in _watch(launches, process, resumes_after=resumes_after):
            pass
        code = process.exit_code(within_s=_EXIT_S)
        if code != ExitCode.OK:
            raise process.failure(f"ended with exit code {code} instead of {ExitCode.OK}")


def run_until_evicted(
    launches: Launches,
    side: Side,
    *,
    attempt: int,
    workers: int,
    point: int,
    trigger: Trigger,
    resumes_after: int | None,
) -> Preemption:
    """Evict an attempt as soon as it has reported step `point` or a later one.

    `resumes_after` is the last step of the evicted attempt before it, None for the first attempt.
    Returns the attempt's last word.

    Raises:
        KettleError: it began anew, ended before its point, hangs, or doesn't end with exit code 75.
    """
    with launches.start(side, attempt=attempt, workers=workers) as process:
        watched = _watch(launches, process, resumes_after=resumes_after)
        if not any(isinstance(record, Step) and record.step >= point for record in watched):
            code = process.exit_code(within_s=_EXIT_S)
            raise process.failure(
                f"ended with exit code {code} before its eviction at step {point}"
            )
        trigger(process.launcher)
        last = process.last_records(within_s=launches.stop_s, doing="has been stopping")
        rest = list(_shown(last, launches.progress))
        code = process.exit_code(within_s=_EXIT_S)
        if code == ExitCode.OK:
            raise process.failure(
                f"completed before its eviction at step {point} took hold; "
                "use more steps or fewer evictions"
            )
        if code != ExitCode.PREEMPTED:
            raise process.failure(
                f"was evicted at step {point} and ended with exit code {code} "
                f"instead of {ExitCode.PREEMPTED}"
            )
        preemptions = [record for record in rest if isinstance(record, Preemption)]
        if not preemptions:
            raise process.failure("was evicted and left no preemption record")
        return preemptions[-1]


def _watch(launches: Launches, process: Attempt, *, resumes_after: int | None) -> Iterator[Record]:
    for record in _shown(process.records(silence_s=launches.silence_s), launches.progress):
        began_anew = isinstance(record, RunStarted) and record.resumed_from is None
        if began_anew and resumes_after is not None:
            raise process.failure(f"began anew instead of resuming from step {resumes_after}")
        yield record


def _shown(records: Iterator[Record], progress: Progress) -> Iterator[Record]:
    for record in records:
        if isinstance(record, RunStarted):
            progress.step(record.resumed_from or 0)
        elif isinstance(record, Step):
            progress.step(record.step)
        yield record
