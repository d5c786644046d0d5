"""Which checkpoints of a run are committed, found with one listing."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsspec import AbstractFileSystem

from kettle.checkpoint.layout import MARKER, step_of


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has a marker; whether the marker holds is the reader's to check.

    Attributes:
        step: from the folder's name.
        name: the folder, directly below the run's prefix.
        sizes_bytes: every object in it, the marker included, as the listing says.
    """

    step: int
    name: str
    sizes_bytes: Mapping[str, int]


def newest_first(filesystem: AbstractFileSystem, prefix: str) -> list[Committed]:
    """All committed checkpoints directly below a prefix, the newest step first.

    One recursive listing on the wire, a request for every 1,000 objects; asking for `*/_COMMIT`
    instead would make one for every checkpoint. The prefix is taken literally.
    """
    # An object store's client remembers listings, and would hide what another process wrote.
    filesystem.invalidate_cache()
    folders: dict[str, dict[str, int]] = {}
    for path, info in filesystem.find(prefix, detail=True).items():
        inside = path.removeprefix(prefix).strip("/").split("/")
        if len(inside) == 2:
            folders.setdefault(inside[0], {})[inside[1]] = info["size"]
    committed = [
        Committed(step=step, name=name, sizes_bytes=sizes)
        for name, sizes in folders.items()
        if MARKER in sizes and (step := step_of(name)) is not None
    ]
    return sorted(committed, key=lambda entry: (entry.step, entry.name), reverse=True)
