"""Stop signals to real launchers: at any instant, from any side, of either kind."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kettle.records import (
    CheckpointCommitted,
    Preemption,
    RunCompleted,
    RunStarted,
    Step,
    StopDecided,
)
from support.processes import (
    LONG_STEPS,
    PATIENCE_S,
    Ended,
    Running,
    catches,
    command,
    finished,
    made_once,
    processes_of,
    started,
    uninterrupted,
    wait_until_caught,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

SWEEP_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SHELL = ["bash", "-c", '"$@"; exit $?', "bash"]
"""`bash -c 'kettle launch ...; exit $?'`: without the `exit`, bash would become the launcher."""


@dataclass(frozen=True)
class Sweep:
    """Attempts of one run, each signalled later after its start, and what became of the run.

    Attributes:
        left: the processes that were left when the attempt's launcher was gone.
    """

    attempts: dict[float, Ended]
    left: dict[float, list[str]]
    resumed: Ended
    uninterrupted: Ended


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    def make() -> Sweep:
        place = tmp_path_factory.mktemp("run")
        attempts, left = {}, {}
        for delay_s in SWEEP_S:
            with started(place, command(place, "launch", "--workers", "2")) as launch:
                time.sleep(delay_s)
                # Before Python's own start is over, which takes longer on a busy machine, nothing
                # that is written in Python could catch a signal.
                wait_until_caught(launch.pid, signal.SIGTERM)
                launch.process.terminate()
                attempts[delay_s] = launch.ended()
                left[delay_s] = [str(process) for process in processes_of(place)]
        resumed = finished(place, command(place, "launch"))
        return Sweep(attempts, left, resumed, uninterrupted(tmp_path_factory))

    return made_once(tmp_path_factory, "sweep", make)


@pytest.mark.parametrize("delay_s", SWEEP_S)
def test_signal_at_any_instant_after_the_start_gives_75(sweep: Sweep, delay_s: float) -> None:
    ended = sweep.attempts[delay_s]
    complete = bool(ended.of(RunCompleted))
    assert ended.exit_code == (0 if complete else 75), ended.stderr


@pytest.mark.parametrize("delay_s", SWEEP_S)
def test_signal_at_any_instant_gives_one_preemption_record(sweep: Sweep, delay_s: float) -> None:
    ended = sweep.attempts[delay_s]
    assert len(ended.of(Preemption)) + len(ended.of(RunCompleted)) == 1
    assert len(ended.records) == len(ended.stdout.splitlines())


@pytest.mark.parametrize("delay_s", SWEEP_S)
def test_signal_at_any_instant_says_nothing_on_stderr(sweep: Sweep, delay_s: float) -> None:
    assert sweep.attempts[delay_s].stderr == ""


@pytest.mark.parametrize("delay_s", SWEEP_S)
def test_signal_at_any_instant_leaves_no_process(sweep: Sweep, delay_s: float) -> None:
    assert sweep.left[delay_s] == []


def test_stop_before_any_step_has_nothing_new_to_save(sweep: Sweep) -> None:
    first = sweep.attempts[SWEEP_S[0]]
    (preemption,) = first.records
    assert isinstance(preemption, Preemption)
    assert preemption.outcome == "nothing_new"
    assert (preemption.step, preemption.checkpoint_uri, preemption.save_ms) == (None, None, None)
    assert preemption.grace_left_s is not None
    assert 0 < preemption.grace_left_s < preemption.grace_s


def test_run_that_was_signalled_at_every_instant_ends_with_the_uninterrupted_weights(
    sweep: Sweep,
) -> None:
    assert sweep.resumed.exit_code == 0, sweep.resumed.stderr
    assert (
        sweep.resumed.one(RunCompleted).weights_digest
        == sweep.uninterrupted.one(RunCompleted).weights_digest
    )


def test_launcher_takes_the_first_signal_before_it_imports_anything_heavy(place: Path) -> None:
    with started(place, command(place, "launch")) as launch:
        wait_until_caught(launch.pid, signal.SIGTERM)
        maps = Path(f"/proc/{launch.pid}/maps").read_text()
        assert catches(launch.pid, signal.SIGINT)
        launch.process.terminate()
        ended = launch.ended()
    assert [name for name in ("torch", "numpy", "pydantic") if f"/{name}/" in maps] == []
    assert ended.exit_code == 75


@pytest.mark.parametrize("delay_ms", [5, 10, 20, 40, 80, 160])
def test_launcher_that_has_its_handler_is_never_killed_by_the_signal(
    place: Path, delay_ms: int
) -> None:
    with started(place, command(place, "launch")) as launch:
        wait_until_caught(launch.pid, signal.SIGTERM)
        time.sleep(delay_ms / 1e3)
        launch.process.terminate()
        ended = launch.ended()
    assert ended.exit_code == 75
    assert ended.one(Preemption).outcome == "nothing_new"


def test_launcher_that_inherits_ignored_stop_signals_heeds_them(place: Path) -> None:
    # As a shell without job control starts a command in the background.
    ignored = ["env", "--ignore-signal=INT", "--ignore-signal=TERM"]
    with started(place, [*ignored, *command(place, "launch")]) as launch:
        wait_until_caught(launch.pid, signal.SIGINT)
        launch.process.send_signal(signal.SIGINT)
        ended = launch.ended()
    assert ended.exit_code == 75


def test_stop_while_the_workers_start_ends_them_at_once(place: Path) -> None:
    with started(place, command(place, "launch", "--workers", "2")) as launch:
        workers = started_workers(launch)
        launch.process.terminate()
        ended = launch.ended()
    assert ended.exit_code == 75
    assert ended.stderr == ""
    assert ended.one(Preemption).outcome == "nothing_new"
    assert [worker for worker in workers if worker.is_running()] == []


@pytest.fixture(scope="module")
def one_rank_signalled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Ended]:
    """An attempt of two ranks of which rank 1 alone is told, and the next attempt."""

    def make() -> tuple[Ended, Ended]:
        place = tmp_path_factory.mktemp("run")
        # Every step is committed: the stop comes while nothing is unsaved.
        sets = (*LONG_STEPS, "checkpoint.every=1")
        with started(place, command(place, "launch", "--workers", "2", sets=sets)) as launch:
            launch.until(CheckpointCommitted)
            launch.rank(1).terminate()
            evicted = launch.ended()
        return evicted, finished(place, command(place, "train", sets=sets))

    return made_once(tmp_path_factory, "one-rank-signalled", make)


def test_one_rank_signalled_stops_all_ranks_at_the_same_step(
    one_rank_signalled: tuple[Ended, Ended],
) -> None:
    evicted, resumed = one_rank_signalled
    assert evicted.exit_code == 75, evicted.stderr
    boundary = evicted.one(StopDecided).step
    assert boundary == evicted.one(Preemption).step == evicted.of(Step)[-1].step
    assert resumed.one(RunStarted).resumed_from == boundary
    assert [step.step for step in resumed.of(Step)] == list(range(boundary + 1, 5))


def test_stop_on_a_committed_step_saves_nothing(one_rank_signalled: tuple[Ended, Ended]) -> None:
    evicted, _ = one_rank_signalled
    preemption = evicted.one(Preemption)
    assert preemption.outcome == "already_saved"
    assert preemption.save_ms is None
    assert preemption.checkpoint_uri == evicted.of(CheckpointCommitted)[-1].checkpoint_uri


def five_signals_within_a_second(launch: Running) -> None:
    for _ in range(5):
        launch.process.terminate()
        time.sleep(0.1)


def interrupt_the_group(launch: Running) -> None:
    os.killpg(launch.pid, signal.SIGINT)


@pytest.mark.parametrize("stop", [interrupt_the_group, five_signals_within_a_second])
def test_signals_of_any_kind_and_number_are_one_eviction(
    place: Path, stop: Callable[[Running], None]
) -> None:
    # Long enough that the last of the signals meets a process.
    with started(place, command(place, "launch", sets=LONG_STEPS)) as launch:
        launch.until(Step)
        stop(launch)
        ended = launch.ended()
    assert ended.exit_code == 75, ended.stderr
    assert ended.one(Preemption).outcome == "saved"
    assert ended.stderr == ""


def test_group_signalled_under_a_shell_evicts_the_run_though_the_shell_dies(place: Path) -> None:
    with started(place, [*SHELL, *command(place, "launch")]) as shell:
        launcher = launcher_under(shell)
        shell.until(Step)
        os.killpg(shell.pid, signal.SIGTERM)
        ended = shell.ended()
        psutil.wait_procs([launcher], timeout=60)
        left = processes_of(place)
    # bash has no handler, so it does not live to pass the 75 on; use exec where it counts.
    assert ended.exit_code == -signal.SIGTERM
    assert ended.one(Preemption).outcome == "saved"
    assert ended.one(Preemption).exit_code == 75
    assert left == []


def test_shell_signalled_alone_dies_and_the_launcher_goes_on_untold(place: Path) -> None:
    with started(place, [*SHELL, *command(place, "launch")]) as shell:
        launcher = launcher_under(shell)
        shell.until(Step)
        shell.process.terminate()
        assert shell.process.wait(60) == -signal.SIGTERM
        # As PID 1, bash would not even die: the kernel drops the signal.
        ended = shell.ended()
        psutil.wait_procs([launcher], timeout=60)
    assert ended.of(Preemption) == []
    assert ended.one(RunCompleted).exit_code == 0


def test_every_process_signalled_at_once_is_one_orderly_eviction(place: Path) -> None:
    # Loader processes would die of the signal first, and their rank of that. All steps are of one
    # epoch, so that the processes stay the same.
    sets = (*LONG_STEPS, "experiment.data.max_samples=2000", "runtime.loader_workers=2")
    with started(place, command(place, "launch", "--workers", "2", sets=sets)) as launch:
        launch.until(Step)
        family = psutil.Process(launch.pid).children(recursive=True)
        for process in family:
            process.terminate()
        launch.process.terminate()
        ended = launch.ended()
        left = processes_of(place)
    # Each rank has two loader processes, the server that they come from, and Python's tracker.
    assert len(family) == 2 * (1 + 2 + 2)
    assert ended.exit_code == 75, ended.stderr
    assert ended.one(Preemption).outcome == "saved"
    assert ended.stderr == ""
    assert left == []


def test_killed_rank_leaves_no_loader_process_behind(place: Path) -> None:
    # They block SIGTERM, and nobody would know of them.
    sets = (*LONG_STEPS, "experiment.data.max_samples=2000", "runtime.loader_workers=2")
    with started(place, command(place, "train", sets=sets)) as train:
        train.until(Step)
        family = psutil.Process(train.pid).children(recursive=True)
        train.process.kill()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert len(family) == 2 + 2
    assert alive == []


def launcher_under(shell: Running) -> psutil.Process:
    """The launcher that a shell has started."""
    shell.until(RunStarted)
    (launcher,) = shell.children()
    return launcher


def started_workers(launch: Running) -> list[psutil.Process]:
    """Both workers, as soon as they exist."""
    while len(workers := launch.children()) < 2:
        assert launch.process.poll() is None
        time.sleep(0.01)
    return workers
