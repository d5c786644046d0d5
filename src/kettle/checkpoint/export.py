"""A part of a checkpoint as safetensors files, without the rest of the run in memory.

Nothing here knows what the tensors mean. No more than one file is held at a time, and the tensors
are written from where they lie.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from kettle.checkpoint.contents import StoredTensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000


def write_safetensors(
    stored: StoredTensors,
    folder: Path,
    *,
    part: str,
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None],
) -> list[str]:
    """Write the tensors of a part, and an index where they take several files.

    Args:
        folder: exists.
        dtype: of what is written; another one than the stored is rounded to.
        file_bytes: no file is larger, unless it holds one tensor alone.
        progress: told how many bytes of the checkpoint were read after each tensor.

    Returns: the names of the files with tensors.

    Raises:
        TornCheckpointError: the bytes are not what the marker says.
        OSError: the store can't be read, or the folder not written to.
    """
    entries = stored.of_part(part)
    # Tensors without memory: only their sizes decide what goes where.
    sizes = {name: torch.empty(e.size, dtype=dtype, device="meta") for name, e in entries.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=file_bytes)
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            tensors[name] = torch.empty(entries[name].size, dtype=dtype)
            stored.read_into(tensors[name], part=part, name=name)
            progress(entries[name].size.numel() * entries[name].properties.dtype.itemsize)
        _save(tensors, folder / file)
        del tensors
    if split.is_sharded:
        _write_index(folder / INDEX, split.metadata, split.tensor_to_filename)
    return list(split.filename_to_tensors)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for one
        raise OSError(str(error)) from error


def _write_index(path: Path, metadata: Mapping[str, object], files: Mapping[str, str]) -> None:
    document = {"metadata": dict(metadata), "weight_map": dict(files)}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
