"""Local files that are still there after a power cut.

The kernel keeps what was written in memory for as long as it likes, and a new name in a folder as
well: content, name and every new folder above it each need an fsync of their own.
"""

import contextlib
import errno
import io
import os
import uuid
from collections.abc import Iterator
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from kettle.checkpoint.layout import PARTIAL

_WRITEBACK_BYTES = 32 << 20
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}


class DurableLocalFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local filesystem, where what was closed lasts.

    That holds for `open` with "wb" or "xb", for `pipe_file` and for new folders; everything else is
    as in fsspec. Folders above a new file are made where they are missing.
    """

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - fsspec's
        """Make a folder and those above it, each of which lasts."""
        path = self._strip_protocol(path)
        if os.path.isdir(path):  # noqa: PTH112 - a string for fsspec
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return
        missing = []
        while not os.path.isdir(path):  # noqa: PTH112
            missing.append(path)
            path = self._parent(path)
        for folder in reversed(missing):
            # Another rank may make the same ones.
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)  # noqa: PTH102
            _sync_folder(self._parent(folder))

    def _open(
        self, path: str, mode: str = "rb", *, size_estimate: int = 0, **options: Any
    ) -> io.IOBase:
        if mode not in ("wb", "xb") or not options.get("autocommit", True):
            return super()._open(path, mode, **options)  # type: ignore[no-any-return]
        path = self._strip_protocol(path)
        self.makedirs(self._parent(path), exist_ok=True)
        return DurableFile(path, exclusive=mode == "xb", size_estimate=size_estimate)

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **_options: object
    ) -> None:
        """Write a whole object or none: nobody ever sees a part of it.

        Args:
            mode: "overwrite", or "create" to be the first one to write it.

        Raises:
            FileExistsError: the mode is "create" and the path is taken.
        """
        path = self._strip_protocol(path)
        folder = self._parent(path)
        self.makedirs(folder, exist_ok=True)
        partial = f"{folder}/.{uuid.uuid4().hex}{PARTIAL}"
        _write_whole(partial, value)
        try:
            if mode == "create":
                _link(partial, path, content=value)
            else:
                os.replace(partial, path)  # noqa: PTH105
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(partial)  # noqa: PTH107
        _sync_folder(folder)

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill memory with the bytes from an offset on, without a copy in between.

        Raises:
            EOFError: the file ends before.
        """
        path = self._strip_protocol(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(view):
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    raise EOFError(f"it has no byte {offset}")
                offset += count
                view = view[count:]
        finally:
            os.close(descriptor)


class DurableFile(io.RawIOBase):
    """A new file, written from its beginning to its end, that lasts once it is closed.

    Leaving its context with an error, discarding it or forgetting it removes it again.

    Args:
        size_estimate: allocate so many bytes at once; the file may become longer or shorter.
    """

    def __init__(self, path: str, *, exclusive: bool, size_estimate: int) -> None:
        super().__init__()
        self._descriptor: int | None = None
        self.path = path
        self._position = 0
        self._written_back = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if exclusive else os.O_TRUNC)
        self._descriptor = os.open(path, flags, 0o666)
        try:
            _allocate(self._descriptor, size_estimate)
        except OSError:
            self.discard()
            raise

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._position

    def write(self, data: Any) -> int:
        """Append all of these bytes. Raises OSError, for a full disk for one."""
        descriptor = self._opened()
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            count = os.write(descriptor, rest)
            rest = rest[count:]
            self._position += count
        if self._position - self._written_back >= _WRITEBACK_BYTES:
            self._start_writeback(descriptor)
        return len(view)

    def close(self) -> None:
        """Wait until content and name are on the disk; where that fails, the file is removed."""
        if self._descriptor is None:
            return
        try:
            # An estimate that was too large ends here.
            os.ftruncate(self._descriptor, self._position)
            os.fsync(self._descriptor)
            _sync_folder(os.path.dirname(self.path))  # noqa: PTH120
        except OSError:
            self.discard()
            raise
        self._release()

    def discard(self) -> None:
        """Remove the file, unless it was closed."""
        if self._descriptor is None:
            return
        self._release()
        with contextlib.suppress(OSError):
            os.remove(self.path)  # noqa: PTH107

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # A base class would close it, which says that all of it was written.
        self.discard()

    def _release(self) -> None:
        descriptor, self._descriptor = self._opened(), None
        super().close()
        os.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError("I/O operation on closed file")
        return self._descriptor

    def _start_writeback(self, descriptor: int) -> None:
        # The disk works while the next bytes are hashed, instead of from the fsync on.
        if hasattr(os, "posix_fadvise"):
            length = self._position - self._written_back
            os.posix_fadvise(descriptor, self._written_back, length, os.POSIX_FADV_DONTNEED)
        self._written_back = self._position


def read_exactly(filesystem: AbstractFileSystem, path: str, offset: int, view: memoryview) -> None:
    """Fill memory with the bytes of an object from an offset on.

    Raises:
        EOFError: the object ends before.
    """
    if isinstance(filesystem, DurableLocalFileSystem):
        filesystem.read_into(path, offset, view)
        return
    content = filesystem.cat_file(path, start=offset, end=offset + len(view))
    if len(content) != len(view):
        raise EOFError(f"it has no byte {offset + len(content)}")
    view[:] = content


def _allocate(descriptor: int, size_bytes: int) -> None:
    if size_bytes and hasattr(os, "posix_fallocate"):
        with _tolerating(_NO_PREALLOCATION):
            os.posix_fallocate(descriptor, 0, size_bytes)


def _link(partial: str, path: str, *, content: bytes) -> None:
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Still the first one to write it, but a power cut may leave a part of it.
        _write_whole(path, content)


def _write_whole(path: str, content: bytes) -> None:
    """Write a new file; its name doesn't last yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path)  # noqa: PTH107
        raise
    finally:
        os.close(descriptor)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder or "/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _tolerating(_NO_FOLDER_SYNC):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _tolerating(refusals: set[int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in refusals:
            raise
