"""Every change that this process makes to folders and files, as the interpreter announces it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.truncate"}
_watch: Callable[[str, str], None] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watch is None:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(path, str) and flags & (os.O_CREAT | os.O_TRUNC):
            _watch("open", path)
    elif event in _CHANGES:
        _watch(event, str(args[0]))


@contextmanager
def watched_calls(watch: Callable[[str, str], None]) -> Iterator[None]:
    """Call `watch` with name and path before each; what it raises is raised instead of the call."""
    global _watch  # noqa: PLW0603 - the interpreter's hooks are global, and stay for ever
    if not getattr(watched_calls, "installed", False):
        sys.addaudithook(_hook)
        watched_calls.installed = True  # type: ignore[attr-defined]
    _watch = watch
    try:
        yield
    finally:
        _watch = None
