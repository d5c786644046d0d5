"""What lies below a run's prefix, found with one listing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fsspec import AbstractFileSystem

from kettle.checkpoint.layout import LOG, MARKER, METADATA, PARTIAL, Place, place_of


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder; whether it is whole is the reader's to check.

    Attributes:
        sizes_bytes: every object in it, the marker included, as the listing says.
        touched_unix_s: when the store last saw a write in it, or made it, if it is empty; 0 where
            the store doesn't say.
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

    @property
    def may_be_whole(self) -> bool:
        """Whether it is committed, as far as a listing tells.

        A marker without content is half written; one without metadata beside it came too late, from
        a writer that was taken over, into a folder that had been deleted.
        """
        return self.sizes_bytes.get(MARKER, 0) > 0 and METADATA in self.sizes_bytes


@dataclass(frozen=True)
class Listing:
    """Everything of kettle's below a run's prefix, but the log's entries.

    Attributes:
        folders: with and without marker, the newest step and generation first.
        partials: path to time of what a writer has left that was killed within an object.
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
    empty: dict[Place, float] = {}
    filled: set[Place | None] = set()
    partials: dict[str, float] = {}
    for path, info in filesystem.find(prefix, detail=True, withdirs=True).items():
        folder, _, name = path.removeprefix(prefix).strip("/").partition("/")
        place = place_of(folder)
        if place is not None and not name:
            empty[place] = _touched_unix_s(info)
        elif place is not None and "/" not in name and info["type"] == "file":
            found.setdefault(place, {})[name] = info["size"]
            touched[place] = max(touched.get(place, 0.0), _touched_unix_s(info))
        if name:
            filled.add(place)
        if name.endswith(PARTIAL) and (place is not None or folder == LOG):
            partials[path] = _touched_unix_s(info)
    # A local folder is there before anything is in it, and may be all that was made.
    for place in empty.keys() - filled:
        found[place], touched[place] = {}, empty[place]
    folders = [
        Folder(
            place=place,
            sizes_bytes=found[place],
            touched_unix_s=touched[place],
        )
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
