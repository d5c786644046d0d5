"""What `_COMMIT` says, and whether it holds."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kettle.errors import CheckpointError, TornCheckpointError

FORMAT_VERSION = 1


class Marker(BaseModel):
    """The content of `_COMMIT`, as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int
    run_id: str
    fingerprint: str
    step: int
    attempt_id: str
    world_size: int
    device_kind: str = Field(description="Whose random streams the checkpoint holds.")
    versions: dict[str, str]
    sizes_bytes: dict[str, int] = Field(description="Every other object of the checkpoint.")


def read_marker(content: bytes, *, uri: str) -> Marker:
    """Parse a marker. Raises TornCheckpointError naming the checkpoint and the fault."""
    if not content:
        raise TornCheckpointError(f"{uri}: the marker is empty")
    try:
        marker = Marker.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise TornCheckpointError(f"{uri}: the marker can't be read: {fault['msg']}") from error
    if marker.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{uri} has format version {marker.format_version}, and this kettle reads "
            f"{FORMAT_VERSION}; use the version of kettle that wrote it"
        )
    return marker


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
    for name, size in marker.sizes_bytes.items():
        found = found_bytes.get(name)
        if found is None:
            raise TornCheckpointError(f"{uri}: {name} is missing")
        if found != size:
            raise TornCheckpointError(f"{uri}: {name} has {found} bytes and should have {size}")
