"""Interleaved timing: every arm once a repetition, and ratios of what ran side by side.

Another process that takes the machine for a while hits the arms of a repetition alike, so a ratio
within a repetition is steadier than a ratio of two medians.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One execution of an arm, in seconds: on the clock, and of this process's CPU time."""

    wall_s: float
    cpu_s: float


Samples = dict[str, list[Sample]]
"""Samples by the name of the arm, one a repetition."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


def interleave(
    arms: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warmup: int,
    meet: Callable[[], object],
    title: str | None,
) -> Samples:
    """Run every arm once a repetition, in turned order every other time.

    Args:
        meet: called before and after each arm, outside and inside of what is timed, so that
            ranks start together and the slowest one counts.
        title: shown with a count on a terminal's stderr; None: say nothing.
    """
    samples: Samples = {name: [] for name in arms}
    for repetition in range(-warmup, repetitions):
        names = list(arms)
        if repetition % 2:
            names.reverse()
        if title is not None:
            progress(f"{title}: {max(0, repetition + 1)} of {repetitions}")
        for name in names:
            meet()
            wall, cpu = time.perf_counter(), time.process_time()
            arms[name]()
            meet()
            sample = Sample(time.perf_counter() - wall, time.process_time() - cpu)
            if repetition >= 0:
                samples[name].append(sample)
    return samples


def progress(text: str) -> None:
    """Replace the line of progress, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K  {text}")
        sys.stderr.flush()


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios within each repetition."""
    return spread([n / d for n, d in zip(numerators, denominators, strict=True)])
