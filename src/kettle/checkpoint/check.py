"""Whether the bytes of a checkpoint are what its marker says: reads all of them."""

from collections.abc import Callable

from fsspec import AbstractFileSystem

from kettle.checkpoint.digest import verify_object
from kettle.checkpoint.layout import join
from kettle.checkpoint.marker import Marker
from kettle.errors import TornCheckpointError


def fault_of(
    filesystem: AbstractFileSystem,
    folder: str,
    marker: Marker,
    *,
    uri: str,
    progress: Callable[[int], None],
) -> str | None:
    """What is wrong with a checkpoint's objects, or None if every byte is right.

    Args:
        uri: the checkpoint, as a message names it.
        progress: told the number of bytes after each piece that was read.

    Raises:
        OSError: the store can't be read.
    """
    try:
        for name, expected in marker.objects.items():
            verify_object(filesystem, join(folder, name), expected, uri=uri, progress=progress)
    except TornCheckpointError as error:
        return str(error).removeprefix(f"{uri}: ")
    return None
