"""A local filesystem whose checkpoint objects are written only while a gate is open."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from kettle.checkpoint.durable import DurableLocalFileSystem


class GatedFileSystem(DurableLocalFileSystem):
    """`gated://<path>`: opening a shard for writing waits for `gate`."""

    protocol = "gated"
    gate = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("gated://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and path.endswith(".distcp"):
            assert self.gate.wait(timeout=60)
        return super()._open(path, mode, **options)


fsspec.register_implementation("gated", GatedFileSystem, clobber=True)


@contextmanager
def gated(root: Path) -> Iterator[tuple[str, threading.Event]]:
    """A root whose gate is shut, and the gate."""
    GatedFileSystem.gate.clear()
    try:
        yield f"gated://{root}", GatedFileSystem.gate
    finally:
        GatedFileSystem.gate.set()
