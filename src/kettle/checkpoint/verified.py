"""Reads parts of one file, so that every byte that is used belongs to a block that was verified."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fsspec import AbstractFileSystem

from kettle.checkpoint.digest import BLOCK_BYTES, DIGEST_BYTES, ObjectDigest, block_digest
from kettle.checkpoint.durable import read_exactly
from kettle.errors import TornCheckpointError

# A window of 8 MiB touches 9 blocks at most, so that any of them fits.
_BATCH_BLOCKS = 10
_IN_FLIGHT = 2


@dataclass(frozen=True)
class VerifiedFile:
    """A file, and what its blocks must be."""

    filesystem: AbstractFileSystem
    path: str
    digest: ObjectDigest
    uri: str


@dataclass(frozen=True)
class Range:
    """Bytes of a file that somebody needs.

    Attributes:
        into: memory to read whole blocks into; the range begins and ends at block boundaries.
        deliver: otherwise: called with the bytes once they are verified.
    """

    start: int
    end: int
    into: memoryview | None
    deliver: Callable[[memoryview], None] | None


@dataclass
class Batch:
    """Blocks that are read at once.

    Attributes:
        first, end: the blocks, the last one excluded.
        fresh: the first one that isn't there from the batch before.
        into: memory to read them into; None: a buffer.
        ranges: whom the buffer serves.
    """

    first: int
    fresh: int
    end: int
    into: memoryview | None
    ranges: list[Range]


def batches(ranges: Iterable[Range]) -> Iterator[Batch]:
    """Put ranges together so that each block that they touch is read once, in rising order."""
    held: Batch | None = None
    for part in sorted(ranges, key=lambda part: part.start):
        first, end = part.start // BLOCK_BYTES, -(-part.end // BLOCK_BYTES)
        if part.into is not None:
            if held is not None:
                yield held
                held = None
            yield Batch(first, first, end, part.into, [])
        elif held is None or first > held.end or max(end, held.end) - held.first > _BATCH_BLOCKS:
            fresh = first
            if held is not None:
                yield held
                fresh = max(first, held.end)
            held = Batch(first, fresh, end, None, [part])
        else:
            held.end = max(end, held.end)
            held.ranges.append(part)
    if held is not None:
        yield held


def read_verified(file: VerifiedFile, ranges: Iterable[Range]) -> None:
    """Read ranges of a file, verify the blocks they lie in, and deliver them.

    Raises:
        TornCheckpointError: the file is missing, too short, or a block has other bytes. Memory
            that is read into straight away may hold these bytes then.
        OSError: of the store.
    """
    jobs = list(batches(ranges))
    size_bytes = max((job.end - job.first for job in jobs if job.into is None), default=0)
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(_IN_FLIGHT):
        buffers.put(memoryview(bytearray(size_bytes * BLOCK_BYTES)))
    with _Checker(file, buffers) as checker:
        before: tuple[Batch, memoryview] | None = None
        for job in jobs:
            checker.raise_error()
            memory = buffers.get() if job.into is None else job.into
            if before is not None and job.fresh > job.first:
                _carry(before, job, memory)
            _read(file, job, memory)
            checker.put(job, memory)
            before = (job, memory)


def _carry(before: tuple[Batch, memoryview], job: Batch, memory: memoryview) -> None:
    """Blocks that the batch before has read already; the two buffers may be one."""
    earlier, content = before
    shift = (job.first - earlier.first) * BLOCK_BYTES
    length = (job.fresh - job.first) * BLOCK_BYTES
    memory[:length] = content[shift : shift + length]


def _read(file: VerifiedFile, job: Batch, memory: memoryview) -> None:
    start = job.fresh * BLOCK_BYTES
    end = min(job.end * BLOCK_BYTES, file.digest.size_bytes)
    skipped = (job.fresh - job.first) * BLOCK_BYTES
    try:
        read_exactly(file.filesystem, file.path, start, memory[skipped : skipped + end - start])
    except FileNotFoundError as error:
        raise TornCheckpointError(f"{file.uri}: {_name(file)} is missing") from error
    except EOFError as error:
        raise TornCheckpointError(
            f"{file.uri}: {_name(file)} is cut off: {error} and should have "
            f"{file.digest.size_bytes} bytes"
        ) from error


class _Checker:
    """Verifies and delivers in another thread, so that this one can read on meanwhile."""

    def __init__(self, file: VerifiedFile, buffers: "queue.SimpleQueue[memoryview]") -> None:
        self._file = file
        self._buffers = buffers
        self._error: BaseException | None = None
        self._jobs: queue.Queue[tuple[Batch, memoryview] | None] = queue.Queue(_IN_FLIGHT)
        self._thread = threading.Thread(target=self._work, name="kettle-verify", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jobs.put(None)
        self._thread.join()
        if error is None:
            self.raise_error()

    def put(self, job: Batch, memory: memoryview) -> None:
        """Hand over what was read; waits while enough is under way."""
        self._jobs.put((job, memory))

    def raise_error(self) -> None:
        """Raise what went wrong over there, if anything did."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, memory = entry
            # After an error the rest is taken without a look, so that nobody waits for a buffer.
            if self._error is None:
                try:
                    _verify(self._file, job, memory)
                    for part in job.ranges:
                        assert part.deliver is not None
                        shift = job.first * BLOCK_BYTES
                        part.deliver(memory[part.start - shift : part.end - shift])
                except BaseException as error:  # noqa: BLE001 - raised by the other thread
                    self._error = error
            if job.into is None:
                self._buffers.put(memory)


def _verify(file: VerifiedFile, job: Batch, memory: memoryview) -> None:
    for block in range(job.fresh, job.end):
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, file.digest.size_bytes)
        shift = start - job.first * BLOCK_BYTES
        found = block_digest(memory[shift : shift + end - start])
        expected = file.digest.blocks[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if found != expected:
            raise TornCheckpointError(
                f"{file.uri}: {_name(file)} is damaged in block {block} (bytes {start} to {end}): "
                f"it has the digest {found.hex()} and should have {expected.hex()}"
            )


def _name(file: VerifiedFile) -> str:
    return file.path.rsplit("/", 1)[-1]
