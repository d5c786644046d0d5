"""Whether a store does what checkpoints need: asks it, with one small object of its own."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field
from rich.filesize import decimal

from kettle.checkpoint.filesystem import free_bytes, store_faults
from kettle.checkpoint.layout import join

State: TypeAlias = Literal["ok", "warning", "problem"]

_CONTENT = b"written by kettle doctor, which deletes it again"
_LITTLE_BYTES = 1_000_000_000
_CLOCK_S = 60.0


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)

    about: str
    state: State = Field(description="problem: a run would not work, or not safely.")
    text: str


def probe_store(filesystem: AbstractFileSystem, root: str, *, uri: str) -> Iterator[Finding]:
    """Look for, create, read and delete an object below a root; nothing stays behind.

    Ends with the first problem, since what follows would fail as well.
    """
    path = join(root, f".kettle-doctor-{uuid.uuid4().hex}")
    with _nothing_left(filesystem, root, path):
        for about, look in (
            ("reachable", _reachable),
            ("writable", _writable),
            ("readable", _readable),
            ("conditional writes", _conditional),
            ("clock", _clock),
            ("deletable", _deletable),
            ("free space", _free),
        ):
            try:
                with store_faults():
                    state, text = look(filesystem, path)
            # An fsspec filesystem that can only be read raises the last of these.
            except (OSError, ValueError, NotImplementedError) as error:
                reason = f"{type(error).__name__}: {error}"
                yield Finding(
                    about=about,
                    state="problem",
                    text=f"{uri}: {reason}; correct the root, or give this process access",
                )
                return
            yield Finding(about=about, state=state, text=text)


def _reachable(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    filesystem.invalidate_cache()
    try:
        filesystem.ls(path.rpartition("/")[0], detail=False)
    except FileNotFoundError:
        return "ok", "it answers; the root doesn't exist yet"
    return "ok", "the root is there"


def _writable(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    filesystem.pipe_file(path, _CONTENT, mode="create")
    return "ok", "an object was created"


def _readable(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    if filesystem.cat_file(path) != _CONTENT:
        return "problem", "an object that was just written has other bytes; use another store"
    return "ok", "it holds what was written"


def _conditional(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    try:
        filesystem.pipe_file(path, _CONTENT, mode="create")
    except FileExistsError:
        return "ok", "enforced: what exists is not created again"
    text = (
        "not enforced: two attempts of one run that begin within the same moment may not see each "
        "other; let the platform start one at a time, or use a store that supports If-None-Match"
    )
    return "warning", text


def _clock(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    try:
        ahead_s = filesystem.modified(path).timestamp() - time.time()
    except NotImplementedError:
        return "ok", "the store doesn't tell its time"
    if abs(ahead_s) <= _CLOCK_S:
        return "ok", "the store's agrees with this machine's to a minute"
    direction = "ahead of" if ahead_s > 0 else "behind"
    text = (
        f"the store's is {abs(ahead_s):.0f} s {direction} this machine's, by which the age of "
        "unfinished saves is judged; set it right"
    )
    return "warning", text


def _deletable(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    filesystem.rm_file(path)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        return "problem", "an object that was deleted is still there; allow this process to delete"
    return "ok", "the object is gone again"


def _free(filesystem: AbstractFileSystem, path: str) -> tuple[State, str]:
    free = free_bytes(filesystem, path.rpartition("/")[0])
    if free is None:
        return "ok", "the store doesn't say"
    if free < _LITTLE_BYTES:
        return "warning", f"{decimal(free)} only; make room, or lower checkpoint.keep"
    return "ok", decimal(free)


@contextmanager
def _nothing_left(filesystem: AbstractFileSystem, root: str, path: str) -> Iterator[None]:
    """Remove the object, and folders that were made for it."""
    made = []
    if isinstance(filesystem, LocalFileSystem):
        while not os.path.isdir(root):  # noqa: PTH112 - a string for fsspec
            made.append(root)
            root = os.path.dirname(root)  # noqa: PTH120 - as above
    try:
        yield
    finally:
        with suppress(Exception):
            filesystem.rm_file(path)
        for folder in made:
            with suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106 - as above
