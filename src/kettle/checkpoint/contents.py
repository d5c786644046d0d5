"""The tensors of a checkpoint without the run that wrote them: what there is, and one by one."""

from collections.abc import Mapping

import torch
from fsspec import AbstractFileSystem
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kettle.checkpoint.marker import Marker
from kettle.checkpoint.reader import CheckpointReader
from kettle.errors import CheckpointError


class PartSize(BaseModel):
    """What a part of the run takes in a checkpoint."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="As `rng.vrank0`.")
    tensors: int
    size_bytes: int


class StoredTensors:
    """The tensors of one checkpoint. Every byte that is read is verified.

    Attributes:
        uri: the checkpoint, as a message names it.
        tensors: shape and dtype by part and name in it.
    """

    def __init__(
        self, filesystem: AbstractFileSystem, folder: str, *, marker: Marker, uri: str
    ) -> None:
        """Read what there is.

        Raises:
            TornCheckpointError: the metadata is missing or not what the marker says.
            OSError: the store can't be read.
        """
        self.uri = uri
        self._reader = CheckpointReader(filesystem, folder, objects=marker.objects, uri=uri)
        self._metadata = self._reader.read_metadata()
        entries = self._metadata.state_dict_metadata  # raises what is wrong with the metadata
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors: dict[tuple[str, str], TensorStorageMetadata] = {}
        self._names: dict[tuple[str, str], str] = {}
        for name, entry in entries.items():
            assert isinstance(entry, TensorStorageMetadata)
            part, *inner = (self._metadata.planner_data or {}).get(name, (name,))
            key = str(part), ".".join(map(str, inner))
            self.tensors[key] = entry
            self._names[key] = name

    def of_part(self, part: str) -> Mapping[str, TensorStorageMetadata]:
        """Shape and dtype of a part's tensors."""
        return {name: entry for (owner, name), entry in self.tensors.items() if owner == part}

    def read_into(self, target: torch.Tensor, *, part: str, name: str) -> None:
        """Fill a tensor of the same shape, of any dtype, from whatever shards there are.

        Raises:
            CheckpointError: the shape is another one.
            TornCheckpointError: the bytes are not what the marker says.
            OSError: the store can't be read.
        """
        found = self.tensors[part, name].size
        if target.shape != found:
            raise CheckpointError(
                f"{self.uri}: {part}.{name} has the shape {tuple(found)} and should have "
                f"{tuple(target.shape)}; use the version of kettle that wrote it"
            )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state = {self._names[part, name]: target}
        planner.set_up_planner(state, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()


def parts_of(
    filesystem: AbstractFileSystem, folder: str, *, marker: Marker, uri: str
) -> list[PartSize]:
    """How much each part holds, in the order in which they were saved.

    Raises:
        TornCheckpointError: the metadata is missing or not what the marker says.
        OSError: the store can't be read.
    """
    sizes_bytes: dict[str, list[int]] = {}
    for (part, _), entry in StoredTensors(
        filesystem, folder, marker=marker, uri=uri
    ).tensors.items():
        size_bytes = entry.size.numel() * entry.properties.dtype.itemsize
        sizes_bytes.setdefault(part, []).append(size_bytes)
    return [
        PartSize(name=part, tensors=len(sizes), size_bytes=sum(sizes))
        for part, sizes in sizes_bytes.items()
    ]
