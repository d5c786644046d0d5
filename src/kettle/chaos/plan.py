"""Where a trial is evicted and how wide each attempt is: pure functions of the command line."""

import itertools
import random
from collections.abc import Sequence

from kettle.errors import UsageError

_SPACED_BY_FORMULA = 8
"""k * (T // (N + 2)) ends at N / (N + 2) of the run, which is 80 % or less up to this N."""


def plan_evictions(total_steps: int, evictions: int, seed: int | None = None) -> tuple[int, ...]:
    """After which steps to evict: strictly increasing, in 1..80 % of the run.

    Up to eight evictions the points are k * (total_steps // (evictions + 2)). Above that, or where
    a short run makes that distance 0, they are spaced over the first 80 % instead. With a seed each
    point moves within its band: the steps nearer to it than to any other point. The same seed
    always gives the same plan.

    Raises:
        UsageError: no eviction is asked for, or more than there are steps to evict at.
    """
    last = latest_point(total_steps)
    if evictions < 1:
        raise UsageError(f"{evictions} evictions prove nothing; ask for at least 1")
    if evictions > last:
        raise UsageError(
            f"{evictions} evictions don't fit into the first 80 % of {total_steps} steps; "
            f"the largest possible number is {last}"
        )
    stride = total_steps // (evictions + 2)
    if evictions <= _SPACED_BY_FORMULA and stride:
        even = tuple(k * stride for k in range(1, evictions + 1))
    else:
        even = tuple(k * last // evictions for k in range(1, evictions + 1))
    return even if seed is None else _jitter(even, last=last, seed=seed)


def latest_point(total_steps: int) -> int:
    """The last step after which an eviction may come, 80 % of the run rounded down."""
    return total_steps * 4 // 5


def parse_workers(text: str, *, virtual_ranks: int) -> tuple[int, ...]:
    """The widths that `--workers 2` or `--workers 4,2,1,4` asks for.

    Raises:
        UsageError: an entry is no whole number in 1..virtual_ranks.
    """
    return tuple(_width(entry, text=text, virtual_ranks=virtual_ranks) for entry in text.split(","))


def width_of(attempt: int, widths: Sequence[int]) -> int:
    """How many workers an attempt (counted from 1) has.

    A list shorter than the trial starts over rather than holding its last width, so that the
    number of ranks goes on changing.
    """
    return widths[(attempt - 1) % len(widths)]


def _jitter(even: tuple[int, ...], *, last: int, seed: int) -> tuple[int, ...]:
    gaps = (after - before for before, after in itertools.pairwise((0, *even)))
    # Less than half of the smallest gap, so that the bands of two neighbours never touch.
    reach = (min(gaps) - 1) // 2
    stream = random.Random(seed)  # noqa: S311 - a plan to repeat, not a secret
    # random() alone is promised to give the same numbers in every version of Python.
    moved = (point - reach + int(stream.random() * (2 * reach + 1)) for point in even)
    return tuple(min(point, last) for point in moved)


def _width(entry: str, *, text: str, virtual_ranks: int) -> int:
    stripped = entry.strip()
    # Stricter than int(), which also takes signs, underscores and digits of other scripts.
    width = int(stripped) if stripped.isascii() and stripped.isdecimal() else 0
    if not 1 <= width <= virtual_ranks:
        raise UsageError(
            f"--workers {text!r}: {entry!r} is not a number of workers from 1 to "
            f"{virtual_ranks} (experiment.virtual_ranks)"
        )
    return width
