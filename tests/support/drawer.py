"""The smallest filesystem that keeps kettle's objects: a dictionary, for very many runs.

It behaves as an object store does: folders are made of the names of what lies in them.
"""

import io
import time
from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem


class Drawer(AbstractFileSystem):  # type: ignore[misc]
    """Path to content and time of writing."""

    protocol = "drawer"
    cachable = False

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        # Nothing of fsspec's own setup is used, and it would take half of the time.
        self._written_s = time.time()
        self.objects: dict[str, bytes] = dict(objects or {})

    def invalidate_cache(self, path: str | None = None) -> None:
        """There is none."""

    def _info(self, path: str) -> dict[str, Any]:
        size = len(self.objects[path])
        return {"name": path, "size": size, "type": "file", "created": self._written_s}

    def ls(self, path: str, detail: bool = True, **_options: Any) -> Any:  # noqa: FBT001, FBT002
        start = f"{path}/"
        names = sorted(
            {start + p[len(start) :].partition("/")[0] for p in self.objects if p.startswith(start)}
        )
        if not names:
            raise FileNotFoundError(path)
        if not detail:
            return names
        folder = {"size": 0, "type": "directory"}
        return [self._info(n) if n in self.objects else {"name": n, **folder} for n in names]

    def find(self, path: str, detail: bool = False, **_options: Any) -> Any:  # noqa: FBT001, FBT002
        names = sorted(name for name in self.objects if name.startswith(f"{path}/"))
        return {name: self._info(name) for name in names} if detail else names

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self._info(path)

    def exists(self, path: str, **_options: Any) -> bool:
        return path in self.objects

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_options: Any) -> None:
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        """Folders are made of names."""

    def rm_file(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def rmdir(self, path: str) -> None:
        """Folders are made of names."""

    def open(self, path: str, mode: str = "rb", **_options: Any) -> Any:
        assert mode == "wb"
        return _Growing(self.objects, path)


class _Growing(io.RawIOBase):
    """What is written is there at once, as it is on a disk."""

    def __init__(self, objects: dict[str, bytes], path: str) -> None:
        super().__init__()
        self._objects, self._path = objects, path
        objects[path] = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._objects[self._path] = self._objects.get(self._path, b"") + bytes(data)
        return len(data)

    def discard(self) -> None:
        """As fsspec's memory files do: nothing."""
