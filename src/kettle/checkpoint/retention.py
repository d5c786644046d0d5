"""Which committed checkpoints are kept: small policies, pure, combined by union."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kettle.checkpoint.layout import Place

Policy: TypeAlias = Callable[[Sequence[Place]], set[Place]]
"""From whole checkpoints, the newest first, to those that it keeps."""


def latest(count: int) -> Policy:
    """Keep the newest so many."""
    return lambda places: set(places[:count])


def every(steps: int) -> Policy:
    """Keep those of every so many steps; of two writers of one step, the newer one's."""

    def keep(places: Sequence[Place]) -> set[Place]:
        newest_of = {place.step: place for place in reversed(places)}
        return {place for step, place in newest_of.items() if step % steps == 0}

    return keep


def kept(places: Sequence[Place], policies: Sequence[Policy]) -> set[Place]:
    """What any of the policies keeps. Order is by step and generation; time has no say."""
    newest_first = sorted(places, reverse=True)
    return set().union(*(policy(newest_first) for policy in policies))
