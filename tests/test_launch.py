"""The launcher as a process: what its exit status and its records promise."""

import json
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.log import claim
from kettle.records import (
    CheckpointCommitted,
    Preemption,
    RunCompleted,
    RunFailed,
    RunStarted,
    Step,
)
from support.processes import (
    LONG_STEPS,
    PATIENCE_S,
    Ended,
    command,
    finished,
    made_once,
    processes_of,
    started,
    uninterrupted,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Lifetime:
    """A run that was evicted once, and one that was not.

    Attributes:
        place: where the evicted run lies.
        parents: the parent's id of each of its first attempt's two workers, and the launcher's.
        resumed: by `kettle train`.
        again: a launch of the complete run.
    """

    place: Path
    uninterrupted: Ended
    parents: list[int | None]
    launcher: int
    evicted: Ended
    resumed: Ended
    again: Ended


@pytest.fixture(scope="module")
def lifetime(tmp_path_factory: pytest.TempPathFactory) -> Lifetime:
    def make() -> Lifetime:
        place = tmp_path_factory.mktemp("run")
        with started(place, command(place, "launch", "--workers", "2")) as launch:
            launch.until(Step, lambda step: step.step == 3)
            parents: list[int | None] = [launch.rank(rank).ppid() for rank in (0, 1)]
            launch.process.terminate()
            evicted = launch.ended()
        return Lifetime(
            place=place,
            uninterrupted=uninterrupted(tmp_path_factory),
            parents=parents,
            launcher=launch.pid,
            evicted=evicted,
            resumed=finished(place, command(place, "train")),
            again=finished(place, command(place, "launch")),
        )

    return made_once(tmp_path_factory, "lifetime", make)


def test_a_run_that_reaches_its_last_step_exits_0(lifetime: Lifetime) -> None:
    assert lifetime.uninterrupted.exit_code == 0, lifetime.uninterrupted.stderr
    assert [step.step for step in lifetime.uninterrupted.of(Step)] == list(range(1, 41))
    assert lifetime.uninterrupted.one(RunCompleted).step == 40


def test_an_evicted_run_exits_75_with_a_checkpoint_of_its_last_step(lifetime: Lifetime) -> None:
    assert lifetime.evicted.exit_code == 75, lifetime.evicted.stderr
    preemption = lifetime.evicted.one(Preemption)
    assert preemption.outcome == "saved"
    assert preemption.step == lifetime.evicted.of(Step)[-1].step
    assert preemption.checkpoint_uri == lifetime.evicted.one(CheckpointCommitted).checkpoint_uri
    assert Path(preemption.checkpoint_uri, "_COMMIT").is_file()


def test_the_preemption_record_says_how_long_the_save_took_and_what_it_left(
    lifetime: Lifetime,
) -> None:
    preemption = lifetime.evicted.one(Preemption)
    assert preemption.save_ms is not None
    assert preemption.grace_left_s is not None
    assert preemption.save_ms > 0
    assert 0 < preemption.grace_left_s <= preemption.grace_s - preemption.save_ms / 1e3


def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(lifetime: Lifetime) -> None:
    assert lifetime.resumed.exit_code == 0, lifetime.resumed.stderr
    assert (
        lifetime.resumed.one(RunCompleted).weights_digest
        == lifetime.uninterrupted.one(RunCompleted).weights_digest
    )


def test_a_resumed_run_takes_exactly_the_steps_that_are_left(lifetime: Lifetime) -> None:
    boundary = lifetime.evicted.one(Preemption).step
    assert boundary is not None
    assert lifetime.resumed.one(RunStarted).resumed_from == boundary
    assert [step.step for step in lifetime.resumed.of(Step)] == list(range(boundary + 1, 41))


def test_a_launch_of_a_complete_run_exits_0_without_a_step(lifetime: Lifetime) -> None:
    assert lifetime.again.exit_code == 0, lifetime.again.stderr
    assert lifetime.again.of(Step) == []
    assert (
        lifetime.again.one(RunCompleted).weights_digest
        == lifetime.uninterrupted.one(RunCompleted).weights_digest
    )


def test_stdout_holds_records_and_nothing_else(lifetime: Lifetime) -> None:
    for ended in (lifetime.uninterrupted, lifetime.evicted, lifetime.resumed, lifetime.again):
        lines = ended.stdout.splitlines()
        assert len(ended.records) == len(lines) > 0
        assert all(json.loads(line)["event"] for line in lines)


def test_an_orderly_end_says_nothing_on_stderr(lifetime: Lifetime) -> None:
    for ended in (lifetime.uninterrupted, lifetime.evicted, lifetime.resumed, lifetime.again):
        assert ended.stderr == ""


def test_workers_are_direct_children_of_the_launcher(lifetime: Lifetime) -> None:
    assert lifetime.parents == [lifetime.launcher, lifetime.launcher]


def test_a_launcher_leaves_neither_a_process_nor_a_temporary_file(lifetime: Lifetime) -> None:
    assert processes_of(lifetime.place) == []
    left = [path.name for path in (lifetime.place / "tmp").iterdir()]
    assert [name for name in left if name.startswith(("kettle-", "torchelastic"))] == []


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        (("--set", "experiment.total_step=9"), {}, "experiment.total_step: unknown key"),
        (("--set", 'experiment.optim.lr="high"'), {}, "experiment.optim.lr = 'high'"),
        (("--set", "checkpoint.root"), {}, "is not KEY=VALUE"),
        (("--workers", "5"), {}, "5 workers can't host experiment.virtual_ranks = 4"),
        (("--workers", "0"), {}, "0 workers can't host"),
        (("--workers", "two"), {}, "--workers"),
        ((), {"KETTLE_WORKERS": "1.5"}, "KETTLE_WORKERS = 1.5"),
        ((), {"KETTLE_GRACE": "soon"}, "KETTLE_GRACE = 'soon'"),
        (
            ("--set", "experiment.data.source=text", "--set", "runtime.data_path=/no/such/file"),
            {},
            "/no/such/file",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_can_not_be_used_exits_2_before_a_worker_starts(
    place: Path, options: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    ended = finished(place, command(place, "launch", *options), environment=environment)
    assert ended.exit_code == 2
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr
    # A worker that refuses its configuration would say so in a record.
    assert ended.stdout == ""


def test_a_missing_run_file_exits_2(place: Path) -> None:
    arguments = [word.replace("stdlib.toml", "nothing.toml") for word in command(place, "launch")]
    ended = finished(place, arguments)
    assert ended.exit_code == 2
    assert "nothing.toml" in ended.stderr


@dataclass(frozen=True)
class Crash:
    """An attempt with loader processes, one of whose workers was killed, and the next attempt."""

    left: list[str]
    crashed: Ended
    took_s: float
    resumed: Ended


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Crash:
    def make() -> Crash:
        place = tmp_path_factory.mktemp("run")
        sets = ("checkpoint.every=3", "runtime.loader_workers=1")
        with started(place, command(place, "launch", "--workers", "2", sets=sets)) as launch:
            launch.until(CheckpointCommitted)
            launch.rank(1).kill()
            killed_s = launch.elapsed_s()
            crashed = launch.ended()
            left = [str(process) for process in processes_of(place)]
        resumed = finished(place, command(place, "train"))
        return Crash(left, crashed, crashed.after_s - killed_s, resumed)

    return made_once(tmp_path_factory, "crash", make)


def test_a_killed_worker_ends_the_attempt_with_1(crash: Crash) -> None:
    assert crash.crashed.exit_code == 1
    assert crash.crashed.of(Preemption) == []
    failure = crash.crashed.of(RunFailed)[-1]
    assert failure.rank is None
    assert "rank 1 was killed by SIGKILL" in failure.message


def test_a_killed_worker_does_not_leave_the_others_waiting(crash: Crash) -> None:
    assert crash.took_s < 25  # torch's agent would lose patience after 30


def test_a_killed_worker_leaves_no_process_behind(crash: Crash) -> None:
    assert crash.left == []


def test_a_run_whose_worker_was_killed_goes_on_from_its_last_checkpoint(
    crash: Crash, lifetime: Lifetime
) -> None:
    assert crash.resumed.exit_code == 0, crash.resumed.stderr
    assert crash.resumed.one(RunStarted).resumed_from == (
        crash.crashed.of(CheckpointCommitted)[-1].step
    )
    assert (
        crash.resumed.one(RunCompleted).weights_digest
        == lifetime.uninterrupted.one(RunCompleted).weights_digest
    )


def test_ranks_that_disagree_give_1(place: Path) -> None:
    sets = (*LONG_STEPS, "checkpoint.every=1")
    with started(place, command(place, "launch", "--workers", "2", sets=sets)) as launch:
        launch.until(CheckpointCommitted)
        # Rank 1's disk is full from now on. The stop needs no save, so rank 0 leaves in order,
        # and rank 1 fails to leave word.
        launch.rank(1).rlimit(resource.RLIMIT_FSIZE, (0, 0))
        launch.process.terminate()
        ended = launch.ended()
    assert ended.one(Preemption).outcome == "already_saved"
    assert ended.exit_code == 1
    assert "rank 0 exited with 75 (preempted); rank 1" in ended.of(RunFailed)[-1].message


def test_train_alone_is_evicted_like_a_launcher(place: Path) -> None:
    with started(place, command(place, "train")) as train:
        train.until(Step, lambda step: step.step == 2)
        train.process.terminate()
        ended = train.ended()
    assert ended.exit_code == 75, ended.stderr
    assert ended.one(Preemption).outcome == "saved"


def test_workers_die_with_a_launcher_that_is_killed(place: Path) -> None:
    # Nobody could stop them, and they would go on beside the next attempt.
    sets = (*LONG_STEPS, "runtime.loader_workers=1")
    with started(place, command(place, "launch", "--workers", "2", sets=sets)) as launch:
        launch.until(Step)
        family = psutil.Process(launch.pid).children(recursive=True)
        psutil.Process(launch.pid).kill()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert alive == []


def test_attempt_whose_run_was_taken_over_exits_4(tmp_path: Path) -> None:
    arguments = command(tmp_path, "launch", "--workers", "2", sets=("checkpoint.every=3",))
    with started(tmp_path, arguments) as launch:
        begun = launch.until(RunStarted)
        launch.until(CheckpointCommitted)
        prefix = begun.checkpoint_prefix
        claim(*open_store(prefix), uri=prefix, attempt_id="newer")
        ended = launch.ended()
    assert ended.exit_code == 4, ended.stderr
    assert "attempt newer (generation 2) has taken the run over" in ended.stderr
    assert {failure.error for failure in ended.of(RunFailed)} == {"SupersededError"}


def test_run_whose_checkpoints_are_all_damaged_exits_3_and_begins_again_when_told(
    tmp_path: Path,
) -> None:
    with started(tmp_path, command(tmp_path, "train")) as first:
        first.until(Step)
        first.process.terminate()
        committed = Path(first.ended().one(CheckpointCommitted).checkpoint_uri)
    for shard in committed.glob("*.distcp"):
        shard.write_bytes(b"")
    ended = finished(tmp_path, command(tmp_path, "launch", "--workers", "2"))
    assert ended.exit_code == 3, ended.stderr
    assert "begin again from step 0 with --from-scratch" in ended.stderr
    with started(tmp_path, command(tmp_path, "launch", "--from-scratch")) as again:
        assert again.until(RunStarted).resumed_from is None
