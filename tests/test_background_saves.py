"""Periodic saves beside training: the same bits, one at a time, and none that is half done."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from kettle.checkpoint.background import BackgroundSave
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.writer import CheckpointWriter
from kettle.config import RunConfig
from kettle.distributed import Ranks, process_group
from kettle.errors import SaveError
from kettle.evidence.compare import compare
from kettle.records import Alarm, CheckpointCommitted, Preemption, RunCompleted, Step
from kettle.train.saving import Plan, plan_for_stop
from support.attempts import StopAt, Told, alone, attempt, compared
from support.checkpoints import commit, tensors_of
from support.experiments import draw_from_all, noise, tiny
from support.gated import gated
from support.ranks import on_ranks


def background(root: Path | str, **overrides: object) -> RunConfig:
    return tiny(root, checkpoint__periodic="async", checkpoint__keep=9, **overrides)


def by_step(told: Told) -> dict[int, str]:
    return {saved.step: saved.checkpoint_uri for saved in told.of(CheckpointCommitted)}


def test_background_saves_hold_the_same_bits_as_those_that_training_waits_for(
    tmp_path: Path,
) -> None:
    data = noise(transform=draw_from_all)
    waited = alone(tiny(tmp_path / "a", checkpoint__every=2, checkpoint__keep=9), data)
    beside = alone(background(tmp_path / "b", checkpoint__every=2), data)
    assert by_step(waited).keys() == by_step(beside).keys() == {2, 4, 6, 8, 9}
    for step, uri in by_step(waited).items():
        assert compare(uri, by_step(beside)[step]).identical


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_run_resumed_from_a_background_save_is_bit_identical(tmp_path: Path, stop: int) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    config = background(tmp_path / "trial", checkpoint__every=2)
    alone(config, noise(), name="first", stop=StopAt(stop))
    second = alone(config, noise(), name="second")
    assert second.resumed_from == stop - 1
    assert compared(reference, second).identical


def run_on(ranks: Ranks, config: RunConfig, stop_at: int | None, name: str) -> Told:
    stop = StopAt(stop_at) if stop_at else StopAt(-1)
    return attempt(config, noise(), ranks=ranks, name=name, stop=stop)


@pytest.mark.dist
def test_background_saves_on_two_ranks_end_bit_identical(tmp_path: Path) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    config = background(tmp_path / "trial", checkpoint__every=2)
    first = on_ranks(2, run_on, config, 6, "first")[0]
    assert by_step(first).keys() == {2, 4, 5}
    second = on_ranks(2, run_on, config, None, "second")[0]
    assert second.resumed_from == 5
    assert compared(reference, second).identical


def after_step(step: int, act: Callable[[], object]) -> Callable[..., float | None]:
    def source(*, step: int, micro_batch: int, _at: int = step + 1) -> float | None:
        if (step, micro_batch) == (_at, 0):
            act()
        return None

    return source


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    with gated(tmp_path) as (root, gate):
        config = background(root, checkpoint__every=5)
        told = alone(config, noise(), stop=after_step(8, gate.set))
    events = [(r.event, r.step) for r in told.records if isinstance(r, Step | CheckpointCommitted)]
    assert events.index(("checkpoint_committed", 5)) > events.index(("step", 8))
    saved = told.of(CheckpointCommitted)[0]
    assert saved.blocked_ms is not None
    assert saved.blocked_ms < saved.save_ms


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    with gated(tmp_path) as (root, gate):
        threading.Timer(1.0, gate.set).start()
        told = alone(background(root, checkpoint__every=2), noise())
    events = [(r.event, r.step) for r in told.records if isinstance(r, Step | CheckpointCommitted)]
    assert events.index(("checkpoint_committed", 2)) < events.index(("step", 5))
    assert events.index(("step", 4)) < events.index(("checkpoint_committed", 2))


def test_eviction_waits_for_the_save_in_flight_and_then_saves_the_newer_step(
    tmp_path: Path,
) -> None:
    def stop(*, step: int, micro_batch: int) -> float | None:
        if (step, micro_batch) != (6, 1):
            return None
        threading.Timer(0.3, gate.set).start()
        return time.monotonic()

    with gated(tmp_path) as (root, gate):
        told = alone(background(root, checkpoint__every=4), noise(), stop=stop)
    assert by_step(told).keys() == {4, 5}
    (preemption,) = told.of(Preemption)
    assert (preemption.step, preemption.outcome) == (5, "saved")


def test_crash_while_a_save_is_in_flight_leaves_the_one_before(tmp_path: Path) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    config = background(tmp_path / "trial", checkpoint__every=2)

    def crash() -> None:
        raise RuntimeError("a crash")

    with pytest.raises(RuntimeError):
        alone(config, noise(), stop=after_step(4, crash))
    second = alone(config, noise(), name="second")
    assert second.resumed_from in (2, 4)
    assert compared(reference, second).identical


def test_failed_background_save_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    def forbid() -> None:
        (prefix,) = tmp_path.iterdir()
        # A file where the folder of the next checkpoint has to be.
        (prefix / "step-00000004-g0001-attempt").touch()

    told = alone(background(tmp_path, checkpoint__every=2), noise(), stop=after_step(3, forbid))
    (alarm,) = told.of(Alarm)
    assert alarm.kind == "save_failed"
    assert "step-00000004-g0001-attempt" in alarm.message
    assert by_step(told).keys() == {2, 6, 8, 9}
    assert told.of(RunCompleted)


# The pieces.


@pytest.mark.parametrize(
    ("left_s", "expected_s", "plan"),
    [
        (30.0, None, "wait_and_save"),
        (0.1, None, "wait_and_save"),
        (30.0, 2.0, "wait_and_save"),
        (3.0, 2.0, "save_instead"),
        (1.0, 2.0, "wait_only"),
        (-1.0, 2.0, "wait_only"),
    ],
)
def test_stop_takes_the_way_to_the_newer_step_that_the_grace_left_allows(
    left_s: float, expected_s: float | None, plan: Plan
) -> None:
    assert plan_for_stop(left_s=left_s, expected_s=expected_s) == plan


def started(
    ranks: Ranks, folder: Path, weight: torch.Tensor, *, root: str, cancelled: threading.Event
) -> BackgroundSave[str]:
    filesystem, _ = open_store(root)
    writer = CheckpointWriter(filesystem, str(folder), cancelled=cancelled)

    def finish(written: Future[object], _blocked_ms: Callable[[], float]) -> str:
        try:
            written.result()
        except BaseException as error:
            raise SaveError("given up") from error
        commit(folder, writer)
        return "committed"

    save: BackgroundSave[str] = BackgroundSave(ranks)
    save.start(3, {"model": {"w": weight}}, writer=writer, cancelled=cancelled, finish=finish)
    return save


def test_what_training_changes_after_the_copy_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    weight = torch.arange(5.0)
    with process_group("cpu", timeout_s=60) as ranks, gated(tmp_path) as (root, gate):
        save = started(ranks, tmp_path / "c", weight, root=root, cancelled=threading.Event())
        save.wait_until_copied()
        weight.zero_()
        gate.set()
        assert save.finish() == "committed"
    assert tensors_of(tmp_path / "c")["model.w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_save_that_is_given_up_writes_no_more(tmp_path: Path) -> None:
    cancelled = threading.Event()
    with process_group("cpu", timeout_s=60) as ranks, gated(tmp_path) as (root, gate):
        save = started(ranks, tmp_path / "c", torch.ones(5), root=root, cancelled=cancelled)
        save.cancel()
        gate.set()
        assert isinstance(save.finish(), SaveError)
        assert save.step is None
    assert not list((tmp_path / "c").glob("*"))


def test_news_of_a_save_comes_once(tmp_path: Path) -> None:
    with process_group("cpu", timeout_s=60) as ranks, gated(tmp_path) as (root, gate):
        save = started(ranks, tmp_path / "c", torch.ones(5), root=root, cancelled=threading.Event())
        assert save.take_news() is None
        gate.set()
        save.finish()
        assert save.take_news() is not None
        assert save.take_news() is None
