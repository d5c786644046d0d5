"""What the objects of a checkpoint look like.

<folder>/
    __<rank>_0.distcp   the bytes of tensors, row-major, at offsets that the metadata names
    metadata.json       every tensor with its chunks, every file with the digests of its blocks

Chunks above 64 KiB begin at multiples of 4 KiB, smaller ones follow at multiples of 64 bytes; what
lies between is zero. Nothing here is ever unpickled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from kettle.checkpoint.digest import BLOCK_BYTES, ObjectDigest, root_of
from kettle.checkpoint.layout import METADATA
from kettle.errors import CheckpointError

LAYOUT_VERSION = 1
SMALL_BYTES = 64 << 10

_LARGE_ALIGNMENT = 4096
_SMALL_ALIGNMENT = 64


@dataclass(frozen=True)
class Record:
    """Where the bytes of a chunk lie."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor as it was saved: its dtype, its shape and its place."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    record: Record


@dataclass(frozen=True)
class Contents:
    """What lies where in a checkpoint.

    Attributes:
        files: without the metadata itself.
        chunks: by the name of the tensor and the chunk's offsets in it.
    """

    files: Mapping[str, ObjectDigest]
    chunks: Mapping[MetadataIndex, StoredChunk]


def data_name(rank: int) -> str:
    """The object with the bytes that a rank writes."""
    return f"__{rank}_0.distcp"


def place(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The index and offset of each record, in the order in which they lie in the file.

    Large ones come first, so that little is lost between them and the small ones lie together.
    """
    placed = []
    end = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index] <= SMALL_BYTES):
        alignment = _SMALL_ALIGNMENT if lengths[index] <= SMALL_BYTES else _LARGE_ALIGNMENT
        offset = -(-end // alignment) * alignment
        placed.append((index, offset))
        end = offset + lengths[index]
    return placed


def encode(
    metadata: Metadata, records: Mapping[MetadataIndex, Record], files: Mapping[str, ObjectDigest]
) -> bytes:
    """The content of metadata.json. Raises CheckpointError for what is no tensor."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise not_a_tensor(name)
        chunks = []
        for chunk in tensor.chunks:
            record = records[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": record.file,
                    "offset": record.offset,
                    "length": record.length,
                }
            )
        tensors[name] = {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": chunks,
        }
    document = {
        "layout_version": LAYOUT_VERSION,
        "block_bytes": BLOCK_BYTES,
        "files": {
            name: {"size_bytes": file.size_bytes, "blocks": file.blocks.hex()}
            for name, file in files.items()
        },
        "tensors": tensors,
        # How a flat name came from nested mappings: torch's planners ask for it.
        "paths": {name: list(path) for name, path in (metadata.planner_data or {}).items()},
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode(content: bytes, *, uri: str) -> Metadata:
    """Metadata whose `storage_data` are `Contents`, from a metadata.json that was verified.

    Raises:
        CheckpointError: it was written by another version of kettle.
    """
    try:
        document = json.loads(content)
        if (version := document["layout_version"]) != LAYOUT_VERSION:
            raise CheckpointError(
                f"{uri}: {METADATA} has layout version {version}, and this kettle reads "
                f"{LAYOUT_VERSION}; use the version of kettle that wrote it"
            )
        return _metadata(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{uri}: {METADATA} can't be understood ({type(error).__name__}: {error}); "
            "use the version of kettle and torch that wrote it"
        ) from error


def _metadata(document: dict[str, Any]) -> Metadata:
    tensors: dict[str, STORAGE_TYPES] = {}
    chunks = {}
    for name, tensor in document["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        saved = []
        for chunk in tensor["chunks"]:
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            saved.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            record = Record(chunk["file"], chunk["offset"], chunk["length"])
            chunks[MetadataIndex(name, offsets)] = StoredChunk(dtype, tuple(sizes), record)
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(tensor["shape"]), chunks=saved
        )
    files = {}
    for name, file in document["files"].items():
        blocks = bytes.fromhex(file["blocks"])
        files[name] = ObjectDigest(file["size_bytes"], root_of(blocks), blocks)
    paths = {name: tuple(path) for name, path in document["paths"].items()}
    return Metadata(tensors, planner_data=paths, storage_data=Contents(files, chunks))


def not_a_tensor(name: str) -> CheckpointError:
    """The error for an entry that would have to be pickled."""
    return CheckpointError(
        f"{name} is no tensor, and a checkpoint holds tensors only; keep it as a tensor, a number "
        "as one without dimensions"
    )
