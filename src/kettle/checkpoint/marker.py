"""What `_COMMIT` says, and whether it holds."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kettle.checkpoint.digest import Expected
from kettle.errors import CheckpointError, TornCheckpointError

FORMAT_VERSION = 2


class Marker(BaseModel):
    """The content of `_COMMIT`, as JSON: what was saved, by whom, and the proof of every byte."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int
    run_id: str
    fingerprint: str
    step: int
    attempt_id: str
    generation: int = Field(description="Which claim of the run's log its writer held.")
    world_size: int
    device_kind: str = Field(description="Whose random streams the checkpoint holds.")
    versions: dict[str, str]
    experiment: dict[str, Any] = Field(description="The section of the run file that computes.")
    saved_unix_s: float = Field(description="Wall clock; for people, never for order.")
    save_ms: float = Field(description="From the start of the save until every object was durable.")
    objects: dict[str, Expected] = Field(description="Every other object, with size and digest.")

    @property
    def size_bytes(self) -> int:
        """All objects together, without the marker."""
        return sum(expected.size_bytes for expected in self.objects.values())

    def to_bytes(self) -> bytes:
        """The object's content; the same for every writer of the same facts."""
        return self.model_dump_json(indent=2).encode()


def read_marker(content: bytes, *, uri: str) -> Marker:
    """Parse a marker.

    Raises:
        TornCheckpointError: naming the checkpoint and the fault.
        CheckpointError: it was written by another version of kettle.
    """
    if not content:
        raise TornCheckpointError(f"{uri}: the marker is empty")
    try:
        marker = _Version.model_validate_json(content)
        if marker.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{uri} has format version {marker.format_version}, and this kettle reads "
                f"{FORMAT_VERSION}; use the version of kettle that wrote it"
            )
        return Marker.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise TornCheckpointError(
            f"{uri}: the marker can't be read: {where + ': ' if where else ''}{fault['msg']}"
        ) from error


class _Version(BaseModel):
    format_version: int


def check_identity(marker: Marker, *, uri: str, fingerprint: str, device_kind: str) -> None:
    """Refuse a checkpoint that belongs to another computation. Raises CheckpointError."""
    if marker.fingerprint != fingerprint:
        raise CheckpointError(
            f"checkpoint belongs to another experiment\n"
            f"  checkpoint  {uri}\n"
            f"  found       {marker.run_id} (fingerprint {marker.fingerprint})\n"
            f"  expected    fingerprint {fingerprint}\n"
            f"  use another name or root, or restore what changed"
        )
    if marker.device_kind != device_kind:
        raise CheckpointError(
            f"checkpoint was saved on another kind of device\n"
            f"  checkpoint  {uri}\n"
            f"  found       {marker.device_kind} (parts rng.vrank0 and up hold its streams)\n"
            f"  expected    {device_kind}\n"
            f"  resume on {marker.device_kind}, or start a new run"
        )


def check_sizes(marker: Marker, found_bytes: Mapping[str, int], *, uri: str) -> None:
    """Check that every object is there in full size. Raises TornCheckpointError naming one."""
    for name, expected in marker.objects.items():
        found = found_bytes.get(name)
        if found is None:
            raise TornCheckpointError(f"{uri}: {name} is missing")
        if found != expected.size_bytes:
            raise TornCheckpointError(
                f"{uri}: {name} has {found} bytes and should have {expected.size_bytes}"
            )
