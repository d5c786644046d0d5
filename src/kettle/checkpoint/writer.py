"""Writes a checkpoint for torch.distributed.checkpoint: one file a rank, digested as it is written.

Each MiB is hashed while it is in the cache and then written from the memory of the tensor, so
digests cost no second pass and no copy. Small records go through a buffer.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from kettle.checkpoint.digest import BLOCK_BYTES, DigestStream, ObjectDigest
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.format import (
    SMALL_BYTES,
    Record,
    data_name,
    encode,
    not_a_tensor,
    place,
)
from kettle.checkpoint.layout import METADATA
from kettle.checkpoint.windows import is_plain, memory_of, plain, windows
from kettle.errors import CheckpointError

_UPLOAD_BYTES = 16 << 20


class SaveCancelledError(CheckpointError):
    """The save was given up because somebody asked for that; nothing of it counts."""


@dataclass(frozen=True)
class Written:
    """What a rank tells the coordinator about a record.

    Attributes:
        file: of the file that holds it, on the last record of a file only.
    """

    record: Record
    file: ObjectDigest | None


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint into a folder that nobody else uses.

    Args:
        filesystem: where `folder` is. On a `DurableLocalFileSystem` all of it lasts once it is
            saved; an object store says so itself.
        cancelled: looked at before every MiB.

    Attributes:
        objects: after the save, on the coordinator: every object of the checkpoint.

    Saving raises, inside of torch's CheckpointException and on all ranks:
        CheckpointError: an entry is no tensor.
        SaveCancelledError: `cancelled` was set.
        OSError: of the store. What the rank had written is removed.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        folder: str,
        *,
        cancelled: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self.objects: Mapping[str, ObjectDigest] = {}
        self._filesystem = filesystem
        self._folder = folder.rstrip("/")
        self._cancelled = cancelled or threading.Event()

    def reset(self, checkpoint_id: object = None) -> None:  # noqa: ARG002 - the folder is fixed
        """Forget the save before."""
        self.objects = {}

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002, FBT001 - torch's
        *_args: Any,
        **kwargs: Any,
    ) -> None:
        """Take note of nothing; saving without collectives would give all ranks the same file."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("kettle saves with collectives only")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no tensor, before anything is written."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise not_a_tensor(item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file."""
        return [
            dataclasses.replace(plan, storage_data=data_name(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; a rank without records writes none."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_file(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json, whole or not at all."""
        records: dict[MetadataIndex, Record] = {}
        files: dict[str, ObjectDigest] = {}
        for result in (result for rank in results for result in rank):
            written = cast("Written", result.storage_data)
            records[result.index] = written.record
            if written.file is not None:
                files[written.record.file] = written.file
        content = encode(metadata, records, files)
        _refuse_cancelled(self._cancelled)
        self._filesystem.pipe_file(f"{self._folder}/{METADATA}", content)
        stream = DigestStream()
        stream.update(memoryview(content))
        self.objects = files | {METADATA: stream.finish()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 - torch's
        """Never: torch is told which writer to use."""
        return False

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = plan.storage_data
        lengths = [_length(item) for item in plan.items]
        placed = place(lengths)
        last, offset = placed[-1]
        path = f"{self._folder}/{name}"
        with _created(self._filesystem, path, size_estimate=offset + lengths[last]) as file:
            output = _Output(file, cancelled=self._cancelled)
            for index, offset in placed:
                output.pad_to(offset)
                tensor = cast("torch.Tensor", planner.resolve_data(plan.items[index]))
                _write_tensor(output, tensor, lengths[index])
            digest = output.finish()
        results = [
            WriteResult(
                index=plan.items[index].index,
                size_in_bytes=lengths[index],
                storage_data=Written(Record(name, offset, lengths[index]), None),
            )
            for index, offset in placed
        ]
        written = dataclasses.replace(results[-1].storage_data, file=digest)
        return [*results[:-1], dataclasses.replace(results[-1], storage_data=written)]


class _Output:
    """A file with a digest, and a buffer for what is small."""

    def __init__(self, file: Any, *, cancelled: threading.Event) -> None:
        self._file = file
        self._cancelled = cancelled
        self._digest = DigestStream()
        self._position = 0
        self._small = bytearray()

    def pad_to(self, offset: int) -> None:
        """Zeros up to an offset, which is never far."""
        self.write_small(bytes(offset - self._position - len(self._small)))

    def write_small(self, content: bytes | memoryview) -> None:
        """Append through the buffer."""
        self._small += content
        if len(self._small) >= BLOCK_BYTES:
            self._flush()

    def write_large(self, content: memoryview) -> None:
        """Append from where it lies."""
        self._flush()
        self._append(content)

    def finish(self) -> ObjectDigest:
        """What was written."""
        self._flush()
        return self._digest.finish()

    def _flush(self) -> None:
        if self._small:
            self._append(memoryview(self._small))
            self._small = bytearray()

    def _append(self, content: memoryview) -> None:
        while len(content):
            _refuse_cancelled(self._cancelled)
            # Hashed up to the next boundary, and written while it is in the cache.
            piece = content[: BLOCK_BYTES - self._position % BLOCK_BYTES]
            self._digest.update(piece)
            if (count := self._file.write(piece)) not in (None, len(piece)):
                raise OSError(f"the store took {count} of {len(piece)} bytes")
            self._position += len(piece)
            content = content[len(piece) :]


def _write_tensor(output: _Output, tensor: torch.Tensor, length: int) -> None:
    found = tensor.numel() * tensor.itemsize
    if found != length:
        raise CheckpointError(f"a tensor has {found} bytes and was announced with {length}")
    tensor = tensor.detach()
    if length <= SMALL_BYTES:
        output.write_small(memory_of(plain(tensor)))
    elif is_plain(tensor):
        output.write_large(memory_of(tensor))
    else:
        shape = tuple(tensor.shape)
        for window in windows(shape, (0,) * len(shape), shape, itemsize=tensor.itemsize):
            output.write_large(memory_of(plain(window.of(tensor))))


def _length(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@contextlib.contextmanager
def _created(filesystem: AbstractFileSystem, path: str, *, size_estimate: int) -> Iterator[Any]:
    """A new file, which is removed again if anything goes wrong."""
    if isinstance(filesystem, DurableLocalFileSystem):
        file = filesystem.open(path, "wb", size_estimate=size_estimate)
    else:
        file = filesystem.open(path, "wb", block_size=_UPLOAD_BYTES)
    try:
        yield file
        file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        if not isinstance(filesystem, DurableLocalFileSystem):
            _remove(filesystem, path, file)
        raise


def _remove(filesystem: AbstractFileSystem, path: str, file: Any) -> None:
    with contextlib.suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
            # Closing it would send what there is, and so would its finaliser.
            file.closed = True
        else:
            file.close()
    with contextlib.suppress(Exception):
        filesystem.rm_file(path)


def _refuse_cancelled(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise SaveCancelledError("the save was given up before it was whole")
