"""Runs with checkpoints of a few bytes, saved through kettle's own protocol and without torch."""

import os
import time
from pathlib import Path
from typing import Any, Literal

from kettle.checkpoint.events import Failed, Quarantined, Restored
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import checkpoint_name
from kettle.checkpoint.log import Lease, claim
from kettle.checkpoint.marker import Marker
from kettle.checkpoint.protocol import commit, write_objects
from support.checkpoints import marker

SHARD = "__0_0.distcp"


class SavedRun:
    """A run's prefix, and the attempt that holds it."""

    def __init__(self, folder: Path | str, attempt_id: str = "first") -> None:
        self.uri = str(folder)
        self.lease = self._claim(attempt_id, begin="newest")

    @property
    def log_entries(self) -> list[str]:
        return sorted(path.name for path in (Path(self.uri) / "_log").iterdir())

    @property
    def folders(self) -> set[str]:
        return {path.name for path in Path(self.uri).glob("step-*")}

    def begin(self, attempt_id: str, begin: Literal["newest", "scratch"] = "newest") -> None:
        """Another attempt takes the run over."""
        self.lease = self._claim(attempt_id, begin=begin)

    def path(self, name: str) -> Path:
        return Path(self.uri) / name

    def save(self, step: int, **facts: Any) -> str:
        """Commit a checkpoint; its folder's name."""
        name, told = self.write(step, **facts)
        commit(self.lease, told, name=name)
        return name

    def write(self, step: int, **facts: Any) -> tuple[str, Marker]:
        """Everything of a save but the commit."""
        lease = self.lease
        name = checkpoint_name(step, generation=lease.generation, attempt_id=lease.attempt_id)
        folder = f"{lease.prefix}/{name}"
        payloads = {SHARD: b"weights after step %d" % step, "metadata.json": b"{}"}
        objects = write_objects(lease.filesystem, folder, payloads)
        told = {"step": step, "generation": lease.generation, "attempt_id": lease.attempt_id}
        return name, marker(objects=objects, save_ms=12.0, **told, **facts)

    def age(self, name: str, *, hours: float) -> None:
        """Let the last write into a checkpoint be so long ago."""
        moment = time.time() - hours * 3600
        for path in self.path(name).iterdir():
            os.utime(path, (moment, moment))

    def flip(self, name: str) -> None:
        """Change a bit, and no size."""
        path = self.path(name) / SHARD
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)

    def quarantine(self, name: str, reason: str = "three crashes") -> None:
        self.lease.append(Quarantined(name=name, reason=reason))

    def find_damaged(self, name: str, *, restored: str) -> None:
        """An attempt has passed over one checkpoint and restored another."""
        reason = f"{self.uri}/{name}: it has other bytes"
        self.lease.append(Restored(name=restored, damaged={name: reason}))

    def fail(self, *, step: int, times: int) -> None:
        for number in range(times):
            self.begin(f"crash{number}")
            self.lease.append(Failed(step=step, error="ValueError: no"))

    def _claim(self, attempt_id: str, *, begin: Literal["newest", "scratch"]) -> Lease:
        filesystem, prefix = open_store(self.uri)
        return claim(filesystem, prefix, uri=self.uri, attempt_id=attempt_id, begin=begin)
