"""The container's entry: start the workers, pass the stop signal on, decide the exit code.

Workers are started and watched by torch's elastic agent, without its signal handling, which shoots
slow workers and forgets how they ended. Here a stop is only noted and passed on; the workers decide
together when to leave.

Until the workers begin, nothing of the attempt exists, and importing takes them seconds in which
they can't look at a signal. So a stop that comes first ends them right here. Who is first is
decided by a file that launcher and rank 0 both try to create.
"""

# ruff: noqa: PLC0415 - torch takes a second to import, and a stop may come before

import ctypes
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from kettle import signals
from kettle.config import RunConfig
from kettle.data.identify import identify
from kettle.errors import UsageError
from kettle.exits import ExitCode
from kettle.grace import GraceBudget
from kettle.hosting import plan_hosting
from kettle.identity import checkpoint_prefix
from kettle.records import RunFailed, emit, left_before_start

log = logging.getLogger("kettle")

_PR_SET_CHILD_SUBREAPER = 36

_AGENT_SHUTDOWN_S = 30
"""How long torch's agent waits for the other workers once one has exited; not adjustable."""


def launch(
    config: RunConfig,
    *,
    workers: int,
    attempt_id: str,
    grace_s: float,
    begin: Literal["newest", "scratch"],
) -> ExitCode:
    """Run one attempt with this many workers and return what the container should exit with.

    0 only if every worker reached `total_steps`, 75 only if every worker left for an eviction with
    all of its steps saved; another status only if all workers agree on it; any disagreement is 1.

    Raises:
        UsageError: so many workers can't host the experiment, or this torch can't give the grace.
        DataError: the data can't be read.
    """
    plan_hosting(
        virtual_ranks=config.experiment.virtual_ranks,
        world_size=workers,
        exchange=config.runtime.exchange,
    )
    _adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="kettle-") as folder:
        stop_file, begun_file = str(Path(folder) / "stop"), str(Path(folder) / "begun")
        with _passing_stops_on(stop_file, begun_file=begun_file) as ended_here:
            run_id = identify(config).run_id
            if signals.stop_noted_at() is None:
                check_agent(grace_s)
                told = ["--stop-file", stop_file, "--begun-file", begun_file]
                told += ["--run-id", run_id, "--attempt-id", attempt_id, "--grace", str(grace_s)]
                told += ["--begin", begin]
                told += ["--launcher", str(os.getpid())]
                codes = _run_workers(
                    config, Path(folder), workers=workers, told=told, grace_s=grace_s
                )
            else:
                codes = dict.fromkeys(range(workers), int(ExitCode.PREEMPTED))
                ended_here.set()
    if ended_here.is_set():
        codes = {r: ExitCode.PREEMPTED if c == -signal.SIGKILL else c for r, c in codes.items()}
    exit_code = decide(codes)
    if exit_code == ExitCode.PREEMPTED and ended_here.is_set():
        stopped = signals.stop_noted_at()
        assert stopped is not None
        emit(
            left_before_start(
                run_id=run_id,
                attempt_id=attempt_id,
                grace_s=grace_s,
                grace_left_s=GraceBudget(total_s=grace_s, started_s=stopped).left_s(),
            )
        )
    if exit_code == ExitCode.FAILED:
        message = "; ".join(f"rank {rank} {describe(code)}" for rank, code in codes.items())
        log.error("%s", message)
        _note_failure(config, run_id=run_id, attempt_id=attempt_id, error=message)
        emit(
            RunFailed(
                run_id=run_id,
                attempt_id=attempt_id,
                rank=None,
                error="WorkersFailed",
                message=message,
                exit_code=exit_code,
            )
        )
    return exit_code


def check_agent(grace_s: float) -> None:
    """Refuse a torch whose agent can't give the workers the whole grace period.

    Raises:
        UsageError: see `check_grace`.
    """
    import torch

    check_grace(grace_s, agent_settings=_agent_settings(), torch_version=torch.__version__)


def check_grace(grace_s: float, *, agent_settings: Collection[str], torch_version: str) -> None:
    """Refuse a grace period that an agent with these settings would cut short.

    Raises:
        UsageError: naming the version, the limit and the ways out.
    """
    if grace_s > _AGENT_SHUTDOWN_S and "shutdown_timeout" not in agent_settings:
        raise UsageError(
            f"torch {torch_version} stops workers after {_AGENT_SHUTDOWN_S} s whatever the "
            f"grace period, and grace is {grace_s:g} s; use torch 2.12 or newer, or set "
            f"runtime.grace_seconds (or KETTLE_GRACE) to {_AGENT_SHUTDOWN_S} or less"
        )


def _agent_settings() -> set[str]:
    from torch.distributed.launcher.api import LaunchConfig

    return {field.name for field in dataclasses.fields(LaunchConfig)}


def decide(codes: Mapping[int, int]) -> ExitCode:
    """The exit code of an attempt from those of its workers (negative: killed by that signal)."""
    distinct = set(codes.values())
    if len(distinct) == 1 and distinct <= set(ExitCode):
        return ExitCode(distinct.pop())
    return ExitCode.FAILED


def _note_failure(config: RunConfig, *, run_id: str, attempt_id: str, error: str) -> None:
    """Leave word of a crash in the run's log, for workers that could not do so themselves."""
    from kettle.checkpoint.filesystem import absolute, open_store, store_faults
    from kettle.checkpoint.log import note_failure

    uri = checkpoint_prefix(absolute(config.checkpoint.root), run_id)
    try:
        filesystem, prefix = open_store(uri)
        with store_faults():
            note_failure(filesystem, prefix, attempt_id=attempt_id, step=None, error=error)
    except OSError as fault:
        log.warning("could not note the crash below %s: %s", uri, fault)


def describe(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    names = {int(known): known.name.lower() for known in ExitCode}
    return f"exited with {code} ({names.get(code, 'unknown')})"


def _run_workers(
    config: RunConfig, folder: Path, *, workers: int, told: list[str], grace_s: float
) -> dict[int, int]:
    """Start the workers, wait for them, and return each rank's exit status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    exits = folder / "exits"
    exits.mkdir()
    resolved = folder / "run.json"
    resolved.write_text(config.model_dump_json(), encoding="utf-8")
    # kettle says itself how workers ended; the agent would call an orderly 75 a failure.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    settings: dict[str, object] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": workers,
        "run_id": "kettle",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "signals_to_handle": "",
        # By default it leaves an empty folder behind in every attempt.
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "logs")),
    }
    if "shutdown_timeout" in _agent_settings():
        settings["shutdown_timeout"] = int(grace_s) + 1
    command = ["-m", "kettle.train.worker", "--config", str(resolved), "--exits", str(exits), *told]

    failures: Mapping[int, int] = {}
    try:
        elastic_launch(LaunchConfig(**settings), sys.executable)(*command)  # type: ignore[arg-type]
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    finally:
        _end_descendants()
    return {rank: _exit_of(rank, failures, exits) for rank in range(workers)}


def _exit_of(rank: int, failures: Mapping[int, int], exits: Path) -> int:
    """A worker's own word, or else what the agent saw."""
    word = exits / str(rank)
    if word.exists():
        return int(word.read_text(encoding="ascii"))
    # The agent lists only those that had failed when it looked; the rest was killed afterwards.
    return failures.get(rank, -signal.SIGKILL)


@contextmanager
def _passing_stops_on(stop_file: str, *, begun_file: str) -> Iterator[threading.Event]:
    """Tell the workers of a stop, or end them if they have not begun; the event says which.

    Workers start with the stop signals blocked, inherited from here, and unblock them when their
    handlers are in place. So no worker can be killed by the signal, however early it comes. The
    thread looks for signals that every thread blocks; one that a library's thread takes is noted
    by the handler all the same.
    """
    over, ended_here = threading.Event(), threading.Event()

    def pass_on() -> None:
        told = False
        while not over.is_set():
            over.wait(0.05)
            # A blocked signal stays pending until this takes it. (Waiting in sigtimedwait would
            # be as good, but macOS has none.)
            for number in signal.sigpending() & set(signals.STOP_SIGNALS):
                signal.sigwait({number})
                signals.note_stop(at_monotonic_s=time.monotonic())
            stopped = signals.stop_noted_at()
            if stopped is not None and not told:
                told = True
                # In this order: who finds the attempt ended must find out why.
                signals.write_stop_file(stop_file, at_monotonic_s=stopped)
                if signals.claim(begun_file):
                    ended_here.set()
                else:
                    _signal_children(signal.SIGTERM)
            if ended_here.is_set():
                # Each time round: the agent may still be starting some. Stopped first, so that
                # none sees another die and calls it a failure.
                _signal_children(signal.SIGSTOP)
                _signal_children(signal.SIGKILL)

    with signals.stop_signals_blocked():
        thread = threading.Thread(target=pass_on, name="pass-stops-on", daemon=True)
        thread.start()
        try:
            yield ended_here
        finally:
            over.set()
            thread.join()


def _signal_children(number: signal.Signals) -> None:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _adopt_orphans() -> None:
    """Become the parent of what a killed worker leaves behind, as PID 1 would.

    Loader processes block the stop signals, and without their worker nothing leads to them. Only
    Linux can do this; elsewhere they notice within seconds that their worker is gone.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants() -> None:
    """Leave no process behind, and no zombie where this process is PID 1."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
