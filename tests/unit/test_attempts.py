"""The driver against launchers that do what a launcher must not."""

import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kettle.chaos.attempts import Launches, run_to_completion, run_until_evicted
from kettle.chaos.folder import Side
from kettle.chaos.triggers import terminate_launcher
from kettle.errors import KettleError
from kettle.records import Preemption

PREAMBLE = """
import json, os, signal, sys, time
def say(event, **fields):
    print(json.dumps({"event": event, "run_id": "r-0", "attempt_id": "a", **fields}), flush=True)
def run_started(resumed_from):
    say("run_started", fingerprint="f", resumed_from=resumed_from, total_steps=9,
        steps_per_epoch=3, world_size=1, virtual_ranks=1, device_kind="cpu", data_digest="d",
        parameters=1, checkpoint_prefix="p", restore_ms=None, startup_s=0.1, versions={},
        resource={})
def step(number):
    say("step", step=number, epoch=0, loss=1.0, lr=0.1, grad_norm=1.0, tokens=1, tokens_per_s=1.0,
        step_ms=1.0, world_size=1, sample_digest="0")
def preemption(number, exit_code):
    say("preemption", step=number, outcome="saved", checkpoint_uri="u", save_ms=1.0, grace_s=5.0,
        grace_left_s=4.0, exit_code=exit_code)
def on_stop(act):
    signal.signal(signal.SIGTERM, lambda number, frame: act())
def steps_from(first, last):
    for number in range(first, last + 1):
        step(number)
        time.sleep(0.05)
"""


class Silent:
    def phase(self, title: str, *, total_steps: int | None = None) -> None:
        pass

    def step(self, step: int) -> None:
        pass


LaunchesOf = Callable[[str], Launches]


@pytest.fixture
def launches_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchesOf:
    """Launches whose interpreter is a script, whatever it is asked to run."""

    def make(body: str) -> Launches:
        interpreter = tmp_path / "python"
        text = f"#!{sys.executable}\n{PREAMBLE}{textwrap.dedent(body)}"
        interpreter.write_text(text, encoding="utf-8")
        interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(interpreter))
        return Launches(
            run_file=Path("run.toml"),
            overrides=(),
            total_steps=9,
            stop_s=1.0,
            silence_s=20.0,
            progress=Silent(),
        )

    return make


@pytest.fixture
def side(tmp_path: Path) -> Side:
    path = tmp_path / "trial"
    path.mkdir()
    return Side(title="trial", path=path)


def evict(launches: Launches, side: Side, *, resumes_after: int | None = None) -> Preemption:
    return run_until_evicted(
        launches,
        side,
        attempt=2,
        workers=1,
        point=3,
        trigger=terminate_launcher,
        resumes_after=resumes_after,
    )


def test_an_attempt_is_evicted_once_it_reports_its_point(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        stopped = []
        on_stop(lambda: stopped.append(True))
        run_started(None)
        for number in range(1, 10):
            step(number)
            time.sleep(0.05)
            if stopped:
                preemption(number, 75)
                sys.exit(75)
    """)
    last_step = evict(launches, side).step
    assert last_step is not None
    assert last_step >= 3


def test_a_later_step_than_the_point_evicts_too(launches_of: LaunchesOf, side: Side) -> None:
    launches = launches_of("""
        on_stop(lambda: (preemption(5, 75), os._exit(75)))
        run_started(4)
        step(5)
        time.sleep(60)
    """)
    assert evict(launches, side, resumes_after=4).step == 5


def test_an_attempt_that_begins_anew_is_an_error(launches_of: LaunchesOf, side: Side) -> None:
    launches = launches_of("""
        run_started(None)
        time.sleep(60)
    """)
    with pytest.raises(KettleError, match=r"attempt 2 of the trial began anew .* from step 2"):
        evict(launches, side, resumes_after=2)


def test_an_attempt_that_ends_before_its_point_is_an_error(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        run_started(None)
        step(1)
        print("no room left", file=sys.stderr)
        sys.exit(1)
    """)
    with pytest.raises(
        KettleError, match=r"(?s)exit code 1 before its eviction at step 3.*no room"
    ):
        evict(launches, side)


def test_an_attempt_that_completes_before_its_eviction_took_hold_is_an_error(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        on_stop(lambda: None)
        run_started(None)
        steps_from(1, 9)
    """)
    with pytest.raises(KettleError, match="attempt 2 of the trial completed before its eviction"):
        evict(launches, side)


def test_an_attempt_that_dies_of_its_eviction_is_an_error(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        run_started(None)
        steps_from(1, 9)
        time.sleep(60)
    """)
    with pytest.raises(KettleError, match="ended with exit code -15 instead of 75"):
        evict(launches, side)


def test_an_attempt_that_says_75_and_nothing_else_is_an_error(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        on_stop(lambda: os._exit(75))
        run_started(None)
        steps_from(1, 9)
        time.sleep(60)
    """)
    with pytest.raises(KettleError, match="left no preemption record"):
        evict(launches, side)


def test_an_attempt_that_hangs_after_its_eviction_is_killed(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        on_stop(lambda: None)
        run_started(None)
        print(os.getpid(), file=sys.stderr, flush=True)
        steps_from(1, 9)
        while True:
            time.sleep(60)
    """)
    began_s = time.monotonic()
    with pytest.raises(KettleError, match="has been stopping for more than 1 s"):
        evict(launches, side)
    assert time.monotonic() - began_s < 15
    assert not psutil.pid_exists(int(side.errors(2).read_text()))


def test_a_run_that_should_complete_and_does_not_is_an_error(
    launches_of: LaunchesOf, side: Side
) -> None:
    launches = launches_of("""
        run_started(None)
        step(1)
        sys.exit(75)
    """)
    with pytest.raises(KettleError, match="ended with exit code 75 instead of 0"):
        run_to_completion(launches, side, attempt=1, workers=1, resumes_after=None)


def test_each_side_has_its_own_checkpoint_root(
    launches_of: LaunchesOf, side: Side, tmp_path: Path
) -> None:
    launches = launches_of("""
        print(*sys.argv[1:], sep="\\n", file=sys.stderr)
    """)
    run_to_completion(launches, side, attempt=1, workers=1, resumes_after=None)
    said = side.errors(1).read_text().splitlines()
    assert said[-1] == f'checkpoint.root="{tmp_path / "trial" / "checkpoints"}"'
    assert os.fspath(side.path) == side.checkpoint_root.removesuffix("/checkpoints")
