"""One rank of an attempt, and the process that the launcher starts for it."""

# ruff: noqa: PLC0415 - the signal handlers come before every heavy import

from kettle import signals

if __name__ == "__main__":
    signals.install()

import argparse
import ctypes
import logging
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kettle.checkpoint.filesystem import bound_retries, use_endpoint
from kettle.config import RunConfig, deployment_facts
from kettle.errors import DataError, KettleError
from kettle.exits import ExitCode
from kettle.grace import GraceBudget
from kettle.records import Record, RunFailed, emit, left_before_start

if TYPE_CHECKING:
    from kettle.train.loop import Outcome
    from kettle.train.run import Run

log = logging.getLogger("kettle")

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Attempt:
    """What the launcher tells each worker.

    Attributes:
        grace_s: seconds between SIGTERM and SIGKILL.
        stop_file: where the launcher writes when it was told to stop; None without a launcher.
        begun_file: who creates it first, launcher or rank 0, answers a stop from then on.
        begin: where from; "scratch" leaves all committed checkpoints behind.
    """

    run_id: str
    attempt_id: str
    grace_s: float
    stop_file: str | None
    begun_file: str | None
    begin: Literal["newest", "scratch"]


def work(config: RunConfig, attempt: Attempt) -> ExitCode:
    """Train on this rank until the end, an eviction or an error; collective over all ranks.

    RANK, WORLD_SIZE and the other variables of torch's launcher say which rank this is; without
    them it is the only one. An error becomes a `run_failed` record, words on stderr and its exit
    code.
    """
    try:
        return _train(config, attempt)
    except KettleError as error:
        log.error("%s", error)  # noqa: TRY400 - an expected error needs no traceback
        return _failed(error, attempt, exit_code=error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last line of defence
        traceback.print_exc()
        return _failed(error, attempt, exit_code=ExitCode.FAILED)


def _train(config: RunConfig, attempt: Attempt) -> ExitCode:
    from kettle.data.loader import open_dataset
    from kettle.distributed import earliest, process_group
    from kettle.train.assemble import assemble
    from kettle.train.stop import signal_source

    runtime = config.runtime
    with process_group(runtime.device, timeout_s=runtime.timeout_seconds) as ranks:
        stop = signal_source(attempt.stop_file)
        run = assemble(
            config,
            open_dataset(config.experiment.data, path=runtime.data_path),
            ranks=ranks,
            attempt_id=attempt.attempt_id,
            stop=stop,
            emit=emit if ranks.is_first else _say_nothing,
            grace_s=attempt.grace_s,
            begin=attempt.begin,
        )
        if run.run_id != attempt.run_id:
            raise DataError(
                f"the data changed while the attempt started: it was {attempt.run_id} and is now "
                f"{run.run_id}; start it again once nothing writes to the data"
            )
        # Nothing was written so far. Nobody leaves alone: the others would wait for it.
        is_speaker = ranks.is_first and _begin(attempt)
        stopped = earliest(stop(step=0, micro_batch=0), ranks=ranks)
        if stopped is not None:
            if is_speaker:
                emit(_left_before_start(attempt, stopped=stopped))
            return ExitCode.PREEMPTED
        outcome = train_or_note(run)
        run.batches.close()
    return outcome.exit_code


def train_or_note(run: "Run") -> "Outcome":
    """Train, and leave word in the run's log if that crashes; collective."""
    from kettle.train.loop import train

    try:
        return train(run)
    except Exception as error:
        if getattr(error, "exit_code", ExitCode.FAILED) == ExitCode.FAILED:
            run.store.note_failure(step=run.progress.step, error=str(error))
        raise


def _begin(attempt: Attempt) -> bool:
    """Whether the attempt is now the workers' own; if not, the launcher is ending them."""
    if attempt.begun_file is None or signals.claim(attempt.begun_file):
        return True
    assert attempt.stop_file is not None
    told = signals.read_stop_file(attempt.stop_file)
    assert told is not None
    signals.note_stop(at_monotonic_s=told)
    return False


def _left_before_start(attempt: Attempt, *, stopped: float) -> Record:
    budget = GraceBudget(total_s=attempt.grace_s, started_s=stopped)
    return left_before_start(
        run_id=attempt.run_id,
        attempt_id=attempt.attempt_id,
        grace_s=attempt.grace_s,
        grace_left_s=budget.left_s(),
    )


def _failed(error: Exception, attempt: Attempt, *, exit_code: ExitCode) -> ExitCode:
    emit(
        RunFailed(
            run_id=attempt.run_id,
            attempt_id=attempt.attempt_id,
            rank=int(os.environ.get("RANK", "0")),
            error=type(error).__name__,
            message=str(error),
            exit_code=exit_code,
        )
    )
    return exit_code


def talk_to_a_person() -> None:
    """Say on stderr how the run goes if that is a terminal; a log has the records."""
    if sys.stderr.isatty():
        log.setLevel(logging.INFO)


def _die_with(launcher: int) -> None:
    """Be killed when the launcher is: nobody would stop this worker, and a next attempt may come.

    Only Linux can do this.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)  # it was gone before the call above


def _say_nothing(record: Record) -> None:
    """Every rank makes the same records; rank 0's are enough."""


def main() -> int:
    """Read what the launcher passes, work, and leave word of the exit code."""
    parser = argparse.ArgumentParser(description="One rank of a kettle attempt.")
    parser.add_argument("--config", type=Path, required=True, help="a RunConfig as JSON")
    parser.add_argument("--exits", type=Path, required=True, help="folder for exit codes by rank")
    parser.add_argument("--stop-file", required=True)
    parser.add_argument("--begun-file", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--attempt-id", required=True)
    parser.add_argument("--grace", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--begin", choices=["newest", "scratch"], required=True)
    parser.add_argument("--launcher", type=int, required=True, metavar="PID")
    said = parser.parse_args()
    _die_with(said.launcher)

    rank = os.environ["RANK"]
    logging.basicConfig(format=f"kettle: rank {rank}: %(message)s", level=logging.WARNING)
    talk_to_a_person()
    facts = deployment_facts()
    if facts.s3_endpoint:
        use_endpoint(facts.s3_endpoint)
    bound_retries(said.grace)
    config = RunConfig.model_validate_json(said.config.read_text(encoding="utf-8"))
    exit_code = work(
        config,
        Attempt(
            run_id=said.run_id,
            attempt_id=said.attempt_id,
            grace_s=said.grace,
            stop_file=said.stop_file,
            begun_file=said.begun_file,
            begin=said.begin,
        ),
    )
    # Whole or not at all: the launcher would take half a word for an answer.
    partial = said.exits / f"{rank}.partial"
    partial.write_text(str(int(exit_code)), encoding="ascii")
    partial.rename(said.exits / rank)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
