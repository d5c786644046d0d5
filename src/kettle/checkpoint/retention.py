"""Which checkpoints are kept, and what may be deleted: pure.

Committed ones are kept by small policies that are combined by union.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kettle.checkpoint.catalog import Folder, Listing
from kettle.checkpoint.events import LogState
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


@dataclass(frozen=True)
class Sorted:
    """What may be deleted below a run's prefix, by the reason, and what stays.

    Attributes:
        keep: committed, and wanted by a policy.
        retired: committed, and wanted by none; only while one of `keep` is known to be whole.
        damaged: not what their marker says, and older than the newest one that is whole.
        debris: without a marker that says anything, and never to have one: their writers are
            superseded.
        left_behind: from before the run began again; only while one of `keep` is known to be whole.
        quarantined: set aside, until a person releases them.
        partials: objects within which a writer was killed.
    """

    keep: Sequence[Folder]
    retired: Sequence[Folder]
    damaged: Sequence[Folder]
    debris: Sequence[Folder]
    left_behind: Sequence[Folder]
    quarantined: Sequence[Folder]
    partials: Sequence[str]


def sort_out(
    listing: Listing,
    state: LogState,
    *,
    policies: Sequence[Policy],
    newest: Place | None,
    generation: int,
    untouched_since_unix_s: float,
) -> Sorted:
    """Say what of a listing may be deleted.

    What claims to be newer than `newest` takes no place from others.

    Args:
        listing: made after the log was read.
        policies: what to keep.
        newest: the last checkpoint that is known to be whole; None: nothing committed may go.
        generation: debris of this one and newer ones may still be written to.
        untouched_since_unix_s: debris that was written to later than this stays.
    """
    aside = [f for f in listing.folders if f.has_marker and f.name in state.quarantined]
    others = [f for f in listing.folders if f not in aside]
    current = [f for f in others if f.place.generation >= state.from_generation]
    old = [f for f in current if newest is not None and f.place <= newest]
    damaged = [f for f in old if f.name in state.damaged and f.place != newest]
    whole = [f for f in old if f.may_be_whole and f.name not in state.damaged]
    places = kept([folder.place for folder in whole], policies) | {newest}
    return Sorted(
        keep=[folder for folder in whole if folder.place in places],
        retired=[folder for folder in whole if folder.place not in places],
        damaged=damaged,
        debris=[
            folder
            for folder in others
            if not folder.may_be_whole
            and folder not in damaged
            and folder.name != state.newest
            and folder.place.generation < generation
            and folder.touched_unix_s < untouched_since_unix_s
        ],
        left_behind=[f for f in others if f.may_be_whole and f not in current],
        quarantined=aside,
        partials=[
            path
            for path, touched_unix_s in listing.partials.items()
            if touched_unix_s < untouched_since_unix_s
        ],
    )
