import contextlib
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kettle.chaos.follow import kill_tree, launch_command, started
from kettle.chaos.triggers import terminate_launcher
from kettle.errors import KettleError
from kettle.records import CheckpointSkipped, RunFailed

PREAMBLE = """
import json, os, signal, subprocess, sys, time
def say(event, **fields):
    record = {"event": event, "run_id": "r-0", "attempt_id": "a", **fields}
    print(json.dumps(record), flush=True)
def skipped(reason):
    say("checkpoint_skipped", checkpoint_uri="u", reason=reason)
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Files:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "attempt-1.jsonl"
        self.errors = folder / "attempt-1.stderr"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_records_come_in_order_and_other_lines_are_passed_over(files: Files) -> None:
    command = script("""
        skipped("one")
        print("not a record")
        skipped("two")
    """)
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        reasons = [
            record.reason
            for record in attempt.records(silence_s=30)
            if isinstance(record, CheckpointSkipped)
        ]
        assert attempt.exit_code(within_s=30) == 0
    assert reasons == ["one", "two"]


def test_the_log_holds_every_line_as_it_came(files: Files) -> None:
    command = script(r"""
        sys.stdout.buffer.write(b'{"event": "odd", \xff}\n\nno end of line')
    """)
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        assert list(attempt.records(silence_s=30)) == []
    assert files.log.read_bytes() == b'{"event": "odd", \xff}\n\nno end of line'


def test_a_line_is_in_the_log_before_the_attempt_ends(files: Files) -> None:
    command = script("""
        skipped("early")
        time.sleep(60)
    """)
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        next(attempt.records(silence_s=30))
        assert "early" in files.log.read_text()


def test_reading_goes_on_where_the_last_reader_left_off(files: Files) -> None:
    command = script("""
        skipped("one")
        say("run_failed", rank=None, step=None, error="E", message="m", exit_code=1)
    """)
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        next(attempt.records(silence_s=30))
        rest = list(attempt.last_records(within_s=30, doing="is ending"))
        again = list(attempt.last_records(within_s=30, doing="is ending"))
    assert [type(record) for record in rest] == [RunFailed]
    assert again == []


def test_a_silent_attempt_is_an_error_with_the_end_of_its_stderr(files: Files) -> None:
    command = script("""
        print("stuck on purpose", file=sys.stderr, flush=True)
        print("and ready", flush=True)
        time.sleep(60)
    """)
    with started(command, name="attempt 3", log=files.log, errors=files.errors) as attempt:
        while "ready" not in files.log.read_text():
            time.sleep(0.01)
        with pytest.raises(KettleError, match=r"(?s)attempt 3 has written nothing.*on purpose"):
            list(attempt.records(silence_s=0.2))


def test_an_attempt_that_talks_on_past_its_time_is_an_error(files: Files) -> None:
    command = script("""
        while True:
            skipped("still here")
            time.sleep(0.01)
    """)
    with (
        started(command, name="attempt 3", log=files.log, errors=files.errors) as attempt,
        pytest.raises(KettleError, match=r"attempt 3 is stopping for more than 0\.3 s"),
    ):
        list(attempt.last_records(within_s=0.3, doing="is stopping"))


def test_an_attempt_that_outlives_its_stdout_is_an_error(files: Files) -> None:
    command = script("""
        os.close(1)
        time.sleep(60)
    """)
    with started(command, name="attempt 3", log=files.log, errors=files.errors) as attempt:
        list(attempt.records(silence_s=30))
        with pytest.raises(KettleError, match="lives on"):
            attempt.exit_code(within_s=0.2)


def test_the_trigger_sends_sigterm_to_the_launcher(files: Files) -> None:
    command = script("""
        skipped("ready")
        time.sleep(60)
    """)
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        next(attempt.records(silence_s=30))
        terminate_launcher(attempt.launcher)
        assert attempt.exit_code(within_s=30) == -signal.SIGTERM


def test_leaving_kills_the_launcher_and_workers_in_other_sessions(files: Files) -> None:
    command = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        skipped(str(worker.pid))
        time.sleep(60)
    """)
    pids = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        started(command, name="it", log=files.log, errors=files.errors) as attempt,
    ):
        record = next(attempt.records(silence_s=30))
        assert isinstance(record, CheckpointSkipped)
        pids = [attempt.launcher.pid, int(record.reason)]
        raise KeyboardInterrupt
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_killing_what_has_ended_touches_no_other_process(files: Files) -> None:
    with started(script(""), name="it", log=files.log, errors=files.errors) as attempt:
        assert attempt.exit_code(within_s=30) == 0
        kill_tree(attempt.launcher)
    assert psutil.pid_exists(os.getpid())


def test_each_attempt_gets_its_own_id(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KETTLE_ATTEMPT_ID", "one-for-all")
    command = script("""skipped(os.environ.get("KETTLE_ATTEMPT_ID", "its own"))""")
    with started(command, name="it", log=files.log, errors=files.errors) as attempt:
        (record,) = attempt.records(silence_s=30)
    assert isinstance(record, CheckpointSkipped)
    assert record.reason == "its own"


def test_the_command_is_what_a_person_would_type() -> None:
    command = launch_command(Path("run.toml"), workers=2, overrides=["a.b=1", "c.d=x"])
    assert command[1:] == [
        *("-m", "kettle", "launch", "run.toml", "--workers", "2"),
        *("--set", "a.b=1", "--set", "c.d=x"),
    ]
