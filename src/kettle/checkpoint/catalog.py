"""What lies below a run's prefix, found with one listing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fsspec import AbstractFileSystem

from kettle.checkpoint.layout import LOG, MARKER, PARTIAL, Place, place_of


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder; whether it is whole is the reader's to check.

    Attributes:
        sizes_bytes: every object in it, the marker included, as the listing says.
        touched_unix_s: when the store last saw a write in it; 0 where the store doesn't say.
    """

    place: Place
    sizes_bytes: Mapping[str, int]
    touched_unix_s: float

    @property
    def name(self) -> str:
        """The folder, directly below the run's prefix."""
        return self.place.name

    @property
    def has_marker(self) -> bool:
        """Whether somebody has committed it."""
        return MARKER in self.sizes_bytes


@dataclass(frozen=True)
class Listing:
    """Everything of kettle's below a run's prefix, but the log's entries.

    Attributes:
        folders: with and without marker, the newest step and generation first.
        partials: path to time of what a killed writer of the log has left.
    """

    folders: Sequence[Folder]
    partials: Mapping[str, float]


def look(filesystem: AbstractFileSystem, prefix: str) -> Listing:
    """List what lies directly below a prefix, which is taken literally.

    One recursive listing on the wire, a request for every 1,000 objects; asking for `*/_COMMIT`
    instead would make one for every checkpoint.
    """
    # An object store's client remembers listings, and would hide what another process wrote.
    filesystem.invalidate_cache()
    found: dict[Place, dict[str, int]] = {}
    touched: dict[Place, float] = {}
    partials: dict[str, float] = {}
    for path, info in filesystem.find(prefix, detail=True).items():
        inside = path.removeprefix(prefix).strip("/").split("/")
        if len(inside) != 2:
            continue
        folder, name = inside
        place = place_of(folder)
        if place is not None:
            found.setdefault(place, {})[name] = info["size"]
            touched[place] = max(touched.get(place, 0.0), _touched_unix_s(info))
        elif folder == LOG and name.endswith(PARTIAL):
            partials[path] = _touched_unix_s(info)
    folders = [
        Folder(place=place, sizes_bytes=found[place], touched_unix_s=touched[place])
        for place in sorted(found, reverse=True)
    ]
    return Listing(folders=folders, partials=partials)


def _touched_unix_s(info: Mapping[str, object]) -> float:
    # Local files, S3, GCS and memory each call it something else.
    for key in ("mtime", "LastModified", "updated", "created"):
        match info.get(key):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                return datetime.fromisoformat(text).timestamp()
    return 0.0
