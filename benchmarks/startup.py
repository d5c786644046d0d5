"""From the start of a process to the first step, against importing torch and Qwen2 alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from cases import EXAMPLE
from measure import Sample, Samples, progress

_READY = '"event":"run_started"'
"""In the record that an attempt prints when it is about to take its first step."""

_IMPORT = (
    "from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM\n"
    f"print('{_READY}', flush=True)"
)

IMPORT = "import"


def starts(*, root: Path, repetitions: int) -> Samples:
    """Samples of the time to the first step: kettle train, kettle launch, and imports alone."""
    python = sys.executable
    settings = [str(EXAMPLE), "--set", f"checkpoint.root={root}"]
    kettle = [python, "-m", "kettle"]
    commands = {
        IMPORT: [python, "-c", _IMPORT],
        "kettle train": [*kettle, "train", *settings],
        "kettle launch --workers 1": [*kettle, "launch", *settings, "--workers", "1"],
        "kettle launch --workers 2": [*kettle, "launch", *settings, "--workers", "2"],
    }
    samples: Samples = {name: [] for name in commands}
    # The first round brings files into the page cache and is not counted.
    for repetition in range(-1, repetitions):
        progress(f"startup: {max(0, repetition + 1)} of {repetitions}")
        names = list(commands)
        if repetition % 2:
            names.reverse()
        for name in names:
            sample = _until_ready(commands[name])
            if repetition >= 0:
                samples[name].append(sample)
    return samples


def _until_ready(command: Sequence[str]) -> Sample:
    """Time, and CPU time of the process and its children, to the line that says it is ready."""
    started = time.perf_counter()
    # A session of its own, so that all its processes can be ended at once.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        ready = any(_READY in line for line in process.stdout)
        wall_s = time.perf_counter() - started
        cpu_s = _cpu_s(process.pid) if ready else 0.0
        os.killpg(process.pid, signal.SIGKILL)
    if not ready:
        raise RuntimeError(f"{' '.join(command)} ended before its first step")
    return Sample(wall_s, cpu_s)


def _cpu_s(pid: int) -> float:
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in [parent, *parent.children(recursive=True)]]
    return sum(spent.user + spent.system for spent in times)
