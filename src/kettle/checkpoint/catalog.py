"""Which checkpoints of a run are committed, found with one listing."""

from dataclasses import dataclass

from fsspec import AbstractFileSystem

from kettle.checkpoint.layout import MARKER, step_of


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has a marker; whether the marker holds is the reader's to check.

    Attributes:
        step: from the folder's name.
        name: the folder.
        marker_size: bytes; 0 for a marker that was torn.
    """

    step: int
    name: str
    marker_size: int


def newest_first(filesystem: AbstractFileSystem, prefix: str) -> list[Committed]:
    """All committed checkpoints below a prefix, the newest step first; one listing on the wire.

    `**` makes fsspec list the prefix recursively, 1,000 objects a request; `*/_COMMIT` would make
    a request for every checkpoint.
    """
    filesystem.invalidate_cache()
    found = filesystem.glob(f"{prefix}/**/{MARKER}", detail=True)
    committed = []
    for path, info in found.items():
        name = path.split("/")[-2]
        step = step_of(name)
        if step is not None:
            committed.append(Committed(step=step, name=name, marker_size=info["size"]))
    return sorted(committed, key=lambda entry: (entry.step, entry.name), reverse=True)


def latest_complete(filesystem: AbstractFileSystem, prefix: str) -> Committed | None:
    """The newest checkpoint whose marker is not empty, or None; one listing on the wire."""
    whole = (entry for entry in newest_first(filesystem, prefix) if entry.marker_size)
    return next(whole, None)
