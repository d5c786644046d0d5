"""Committed checkpoints of a few tensors, written as kettle writes them but without a run."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kettle.checkpoint.digest import Expected
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import MARKER
from kettle.checkpoint.marker import FORMAT_VERSION, Marker, read_marker
from kettle.checkpoint.reader import CheckpointReader
from kettle.checkpoint.writer import CheckpointWriter


def committed(folder: Path | str, state: Mapping[str, Any], **facts: Any) -> str:
    """Write a checkpoint with its marker and return its place; facts go into the marker."""
    filesystem, path = open_store(str(folder))
    writer = CheckpointWriter(filesystem, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    commit(folder, writer, **facts)
    return str(folder)


def commit(folder: Path | str, writer: CheckpointWriter, **facts: Any) -> None:
    """Write the marker of what a writer has written."""
    filesystem, path = open_store(str(folder))
    objects = {
        name: Expected(size_bytes=written.size_bytes, digest=written.digest)
        for name, written in writer.objects.items()
    }
    filesystem.pipe_file(f"{path}/{MARKER}", marker(objects=objects, **facts).to_bytes())


def marker(**facts: Any) -> Marker:
    """A marker in which only the given facts matter."""
    defaults = {
        "format_version": FORMAT_VERSION,
        "run_id": "run",
        "fingerprint": "f" * 64,
        "step": 1,
        "attempt_id": "a",
        "generation": 1,
        "world_size": 1,
        "device_kind": "cpu",
        "versions": {},
        "experiment": {},
        "saved_unix_s": 0.0,
        "save_ms": 0.0,
        "objects": {},
    }
    return Marker.model_validate({**defaults, **facts})


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    filesystem, path = open_store(str(folder))
    told = read_marker(filesystem.cat_file(f"{path}/{MARKER}"), uri=str(folder))
    reader = CheckpointReader(filesystem, path, objects=told.objects, uri=str(folder))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def rewrite(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Put other tensors into a checkpoint, and keep what its marker says of the run."""
    facts = read_marker((folder / MARKER).read_bytes(), uri=str(folder)).model_dump()
    for old in folder.iterdir():
        old.unlink()
    committed(folder, state, **{key: facts[key] for key in facts if key != "objects"})
