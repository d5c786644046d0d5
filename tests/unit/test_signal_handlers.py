"""Handlers and masks belong to a process, so each case is a process of its own."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kettle.signals import claim, read_stop_file, write_stop_file

STOPS = [signal.SIGTERM, signal.SIGINT]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )


@pytest.mark.parametrize("number", STOPS)
def test_signal_after_install_is_noted_and_does_not_kill(number: signal.Signals) -> None:
    done = python(
        "import os, time\n"
        "from kettle import signals\n"
        "signals.install()\n"
        "before = time.monotonic()\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "assert before <= signals.stop_noted_at() <= time.monotonic()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_signal_without_install_kills() -> None:
    done = python("import os\nfrom kettle import signals\nos.kill(os.getpid(), 15)")
    assert done.returncode == -signal.SIGTERM


def test_nothing_is_noted_before_a_signal() -> None:
    done = python("from kettle import signals\nsignals.install()\nprint(signals.stop_noted_at())")
    assert done.stdout == "None\n"


def test_first_of_several_requests_starts_the_clock() -> None:
    done = python(
        "import os\n"
        "from kettle import signals\n"
        "signals.install()\n"
        "signals.note_stop(at_monotonic_s=1.5)\n"
        "os.kill(os.getpid(), 15)\n"
        "signals.note_stop(at_monotonic_s=0.5)\n"
        "print(signals.stop_noted_at())"
    )
    assert done.stdout == "1.5\n"


def test_signal_that_came_before_a_worker_could_listen_is_not_lost() -> None:
    worker = "from kettle import signals; signals.install(); print(signals.stop_noted_at() or 0)"
    done = python(
        "import signal, subprocess, sys\n"
        "from kettle import signals\n"
        "with signals.stop_signals_blocked():\n"
        "    worker = subprocess.Popen(\n"
        f"        [sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE, text=True)\n"
        "    worker.send_signal(signal.SIGTERM)\n"
        "out, _ = worker.communicate()\n"
        "print(worker.returncode, float(out) > 0)"
    )
    assert (done.stdout, done.stderr) == ("0 True\n", "")


def test_blocking_ends_with_its_block_and_lets_pending_signals_through() -> None:
    done = python(
        "import os\n"
        "from kettle import signals\n"
        "signals.install()\n"
        "with signals.stop_signals_blocked():\n"
        "    os.kill(os.getpid(), 15)\n"
        "    assert signals.stop_noted_at() is None\n"
        "print(signals.stop_noted_at() is not None)"
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_importing_the_module_brings_nothing_heavy() -> None:
    done = python(
        "import sys\n"
        "before = set(sys.modules)\n"
        "from kettle import signals\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(new - set(sys.stdlib_module_names), new & {'asyncio', 'json', 'logging', 're'})"
    )
    assert done.stdout == "{'kettle'} set()\n"


def test_importing_an_entry_module_lets_no_stop_signal_in() -> None:
    # Loader processes import their rank's main module under another name.
    done = python(
        "import runpy, signal, sys\n"
        "sys.argv = ['kettle', 'train', 'run.toml']\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {15})\n"
        "for name in ('kettle.__main__', 'kettle.train.worker'):\n"
        "    runpy.run_module(name, run_name='__mp_main__')\n"
        "import kettle.__main__\n"
        "print(signal.getsignal(15) is signal.SIG_DFL, 15 in signal.pthread_sigmask(0, ()))"
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_stop_file_says_when_the_stop_came(tmp_path: Path) -> None:
    at_s = time.monotonic()
    write_stop_file(str(tmp_path / "stop"), at_monotonic_s=at_s)
    assert read_stop_file(str(tmp_path / "stop")) == at_s
    assert [file.name for file in tmp_path.iterdir()] == ["stop"]


def test_without_a_stop_file_there_is_no_stop(tmp_path: Path) -> None:
    assert read_stop_file(str(tmp_path / "stop")) is None


def test_what_is_claimed_once_is_nobody_elses(tmp_path: Path) -> None:
    place = str(tmp_path / "begun")
    assert [claim(place), claim(place), claim(place)] == [True, False, False]
