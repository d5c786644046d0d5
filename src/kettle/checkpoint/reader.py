"""Reads a checkpoint for torch.distributed.checkpoint, and verifies every byte that it uses.

Bytes that lie in a target as they do in the file are read into it straight away, everything else
passes through a buffer. `verified` says how reading and verifying overlap.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from kettle.checkpoint.digest import BLOCK_BYTES, Expected, digest_of
from kettle.checkpoint.format import Contents, StoredChunk, decode, not_a_tensor
from kettle.checkpoint.layout import METADATA
from kettle.checkpoint.verified import Range, VerifiedFile, Verify, read_verified
from kettle.checkpoint.windows import (
    WINDOW_BYTES,
    Window,
    byte_strides,
    is_plain,
    memory_of,
    windows,
)
from kettle.errors import CheckpointError, TornCheckpointError


class CheckpointReader(StorageReader):
    """Reads one checkpoint, on any number of ranks.

    Args:
        objects: what every object of the checkpoint must be, from its marker.
        uri: the checkpoint, as a message names it.
        verify: "sizes" compares no digests but that of the metadata.

    Loading raises, inside of torch's CheckpointException and on all ranks:
        TornCheckpointError: an object is missing or not what it must be. Targets may hold a mixture
            of old and new then.
        CheckpointError: the metadata was written by another version.
        OSError: of the store.
    """

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        folder: str,
        *,
        objects: Mapping[str, Expected],
        uri: str,
        verify: Verify = "digests",
    ) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._folder = folder.rstrip("/")
        self._objects = objects
        self._uri = uri
        self._verify = verify
        self._contents = Contents(files={}, chunks={})

    def reset(self, checkpoint_id: object = None) -> None:  # noqa: ARG002 - the folder is fixed
        """Forget the load before."""
        self._contents = Contents(files={}, chunks={})

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The verified metadata, or an object that raises what is wrong when it is looked at.

        torch takes an exception here for a checkpoint of another kind, logs it and raises an
        AssertionError without it. (For the same reason the last parameter isn't called `kwargs`:
        torch would try once more for a checkpoint that was saved without collectives.)
        """
        try:
            return self._read_metadata()
        except Exception as error:  # noqa: BLE001 - raised one step later
            return _Unreadable(error)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002, FBT001 - torch's
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Take over what lies where."""
        self._contents = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse what is no tensor."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise not_a_tensor(item.dest_index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing needs to be arranged between ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's targets, one file after the other."""
        targets = [(item, planner.resolve_tensor(item)) for item in plan.items]
        ranges: dict[str, list[Range]] = {}
        for item, target in targets:
            chunk = self._contents.chunks[item.storage_index]
            ranges.setdefault(chunk.record.file, []).extend(_ranges(item, chunk, target.detach()))
        for name in sorted(ranges):
            file = VerifiedFile(
                filesystem=self._filesystem,
                path=f"{self._folder}/{name}",
                digest=self._contents.files[name],
                uri=self._uri,
                verify=self._verify,
            )
            read_verified(file, ranges[name])
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003 - torch's
        """Never: torch is told which reader to use."""
        return False

    def _read_metadata(self) -> Metadata:
        try:
            content = self._filesystem.cat_file(f"{self._folder}/{METADATA}")
        except FileNotFoundError as error:
            raise TornCheckpointError(f"{self._uri}: {METADATA} is missing") from error
        self._check(METADATA, size_bytes=len(content), digest=digest_of(content))
        metadata = decode(content, uri=self._uri)
        for name, file in metadata.storage_data.files.items():
            self._check(name, size_bytes=file.size_bytes, digest=file.digest)
        return metadata

    def _check(self, name: str, *, size_bytes: int, digest: str) -> None:
        expected = self._objects.get(name)
        if expected is None:
            raise TornCheckpointError(f"{self._uri}: the marker doesn't name {name}")
        if size_bytes != expected.size_bytes:
            raise TornCheckpointError(
                f"{self._uri}: {name} has {size_bytes} bytes and should have {expected.size_bytes}"
            )
        if digest != expected.digest:
            raise TornCheckpointError(
                f"{self._uri}: {name} has the digest {digest} and should have {expected.digest}"
            )


class _Unreadable(Metadata):
    """Raises an error as soon as anybody looks for a tensor in it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        # Called for fields without a default alone, and there is one: `state_dict_metadata`.
        raise self._error


def _ranges(item: ReadItem, chunk: StoredChunk, target: torch.Tensor) -> Iterator[Range]:
    """The bytes of a file that a target needs, and how they get there."""
    if target.shape != item.lengths:
        raise CheckpointError(
            f"{item.dest_index.fqn} has shape {tuple(target.shape)}, and the checkpoint gives it "
            f"{tuple(item.lengths)}"
        )
    if not target.numel():
        return
    itemsize = chunk.dtype.itemsize
    strides = byte_strides(chunk.sizes, itemsize)
    start = chunk.record.offset + sum(
        at * stride for at, stride in zip(item.storage_offsets, strides, strict=True)
    )
    span = itemsize + sum(
        (length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True)
    )
    without_gaps = span == target.numel() * itemsize
    if without_gaps and target.dtype == chunk.dtype and is_plain(target):
        yield from _straight(start, memory_of(target))
        return
    for window in windows(chunk.sizes, item.storage_offsets, item.lengths, itemsize=itemsize):
        first = chunk.record.offset + window.offset
        deliver = partial(
            _copy_window,
            target=window.of(target),
            window=window,
            dtype=chunk.dtype,
            strides=[stride // itemsize for stride in strides],
        )
        yield Range(first, first + window.span, deliver=deliver, into=None)


def _straight(start: int, memory: memoryview) -> Iterator[Range]:
    """Whole blocks go into the memory of the target, the bytes before and after them are copied."""
    end = start + len(memory)
    inner = min(-(-start // BLOCK_BYTES) * BLOCK_BYTES, end)
    inner_end = max(end // BLOCK_BYTES * BLOCK_BYTES, inner)
    for first, last in ((start, inner), (inner_end, end)):
        if first < last:
            part = memory[first - start : last - start]
            yield Range(first, last, deliver=partial(_copy_bytes, target=part), into=None)
    for first in range(inner, inner_end, WINDOW_BYTES):
        last = min(first + WINDOW_BYTES, inner_end)
        yield Range(first, last, deliver=None, into=memory[first - start : last - start])


def _copy_bytes(content: memoryview, *, target: memoryview) -> None:
    target[:] = content


def _copy_window(
    content: memoryview,
    *,
    target: torch.Tensor,
    window: Window,
    dtype: torch.dtype,
    strides: list[int],
) -> None:
    stored = torch.frombuffer(content, dtype=torch.uint8).view(dtype)
    target.copy_(stored.as_strided(window.lengths, strides))
