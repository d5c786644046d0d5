"""A filesystem in front of another one, each of whose operations passes by a watcher.

`torn://<case>+<scheme>/<path>` is `<scheme>://<path>`, as kettle opens it, seen by the watcher that
is registered as this case. So a test changes the URI of a run and nothing else.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from kettle.checkpoint.durable import DurableFile
from kettle.checkpoint.filesystem import open_store

T = TypeVar("T")

Kind: TypeAlias = Literal[
    "open", "write", "close", "discard", "create", "overwrite", "list", "read", "mkdir", "delete"
]

CHANGES: frozenset[Kind] = frozenset(
    {"open", "write", "close", "discard", "create", "overwrite", "mkdir", "delete"}
)


@dataclass(frozen=True)
class Operation:
    """One call of the filesystem; `content` is what it would write."""

    kind: Kind
    path: str
    content: bytes = b""

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


class Watcher:
    """Sees every operation and lets it happen; the others differ.

    Attributes:
        ignores_conditions: what is created is overwritten instead.
    """

    ignores_conditions = False

    def around(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        return act(operation.content)


_CASES: dict[str, Watcher] = {}


@contextmanager
def watched_by(watcher: Watcher, uri: str, *, case: str = "case") -> Iterator[str]:
    """What to write instead of a URI, so that the watcher sees everything."""
    scheme, _, path = uri.partition("://") if "://" in uri else ("file", "", uri)
    _CASES[case] = watcher
    try:
        yield f"torn://{case}+{scheme}/{path}"
    finally:
        del _CASES[case]


class WatchedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """What kettle uses of a filesystem; anything else is missing on purpose."""

    protocol = "torn"
    cachable = False

    def __init__(self, case: str = "", scheme: str = "", **options: Any) -> None:
        super().__init__(**options)
        if case:
            self.inner, _ = open_store(f"{scheme}://")
            self.watcher = _CASES[case]

    @classmethod
    def over(cls, inner: AbstractFileSystem, watcher: Watcher) -> "WatchedFileSystem":
        made = cls()
        made.inner, made.watcher = inner, watcher
        return made

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if not path.startswith("torn://"):
            return path
        authority, _, rest = path.removeprefix("torn://").partition("/")
        scheme = authority.partition("+")[2]
        return str(fsspec.get_filesystem_class(scheme)._strip_protocol(f"{scheme}://{rest}"))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        case, _, scheme = path.removeprefix("torn://").partition("/")[0].partition("+")
        return {"case": case, "scheme": scheme}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.inner.invalidate_cache(path)

    def _pass(self, kind: Kind, path: str, act: Callable[[bytes], T], *, content: bytes = b"") -> T:
        return self.watcher.around(Operation(kind, path, content), act)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002
        return self._pass("list", path, lambda _: self.inner.ls(path, detail=detail, **options))

    def find(self, path: str, **options: Any) -> Any:
        return self._pass("list", path, lambda _: self.inner.find(path, **options))

    def info(self, path: str, **options: Any) -> Any:
        return self._pass("read", path, lambda _: self.inner.info(path, **options))

    def exists(self, path: str, **options: Any) -> bool:
        return self._pass("read", path, lambda _: bool(self.inner.exists(path, **options)))

    def cat_file(self, path: str, **options: Any) -> bytes:
        return self._pass("read", path, lambda _: bytes(self.inner.cat_file(path, **options)))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        def act(content: bytes) -> None:
            kept_mode = "overwrite" if self.watcher.ignores_conditions else mode
            self.inner.pipe_file(path, content, mode=kept_mode, **options)

        self._pass("create" if mode == "create" else "overwrite", path, act, content=bytes(value))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        self._pass("mkdir", path, lambda _: self.inner.makedirs(path, exist_ok=exist_ok))

    def mkdir(self, path: str, **options: Any) -> None:
        self._pass("mkdir", path, lambda _: self.inner.mkdir(path, **options))

    def rm_file(self, path: str) -> None:
        self._pass("delete", path, lambda _: self.inner.rm_file(path))

    def rmdir(self, path: str) -> None:
        self._pass("delete", path, lambda _: self.inner.rmdir(path))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return self._pass("read", path, lambda _: self.inner.open(path, mode, **options))
        file = self._pass("open", path, lambda _: self.inner.open(path, mode, **options))
        return WatchedFile(file, path, self.watcher)


class WatchedFile(io.RawIOBase):
    """A new file of a watched filesystem."""

    def __init__(self, inner: Any, path: str, watcher: Watcher) -> None:
        super().__init__()
        self._inner, self._path, self._watcher = inner, path, watcher
        self._is_open = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        def act(content: bytes) -> int:
            self._inner.write(content)
            return len(data)

        return self._try(Operation("write", self._path, bytes(data)), act)

    def close(self) -> None:
        if self._is_open:
            self._try(Operation("close", self._path), lambda _: self._inner.close())
            self._is_open = False
            super().close()

    def discard(self) -> None:
        if self._is_open:
            self._try(Operation("discard", self._path), lambda _: self._inner.discard())
            self._forget()

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            self.close()
        elif self._is_open:
            self.discard()

    def __del__(self) -> None:
        self._forget()

    def _try(self, operation: Operation, act: Callable[[bytes], T]) -> T:
        try:
            return self._watcher.around(operation, act)
        except Exception:
            raise
        except BaseException:
            # A process that was killed: what it has written stays where it is.
            self._forget()
            raise

    def _forget(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if isinstance(self._inner, DurableFile):
            with suppress(ValueError):
                self._inner._release()
        elif isinstance(self._inner, AbstractBufferedFile):
            # Its finaliser would send what there is.
            self._inner.closed = True
        super().close()


fsspec.register_implementation("torn", WatchedFileSystem, clobber=True)


def contents(filesystem: AbstractFileSystem, root: str) -> Mapping[str, bytes]:
    """Every object below a root."""
    return {path: bytes(filesystem.cat_file(path)) for path in filesystem.find(root)}
