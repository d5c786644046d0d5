"""Reads parts of one file, so that every byte that is used belongs to a block that was verified."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from fsspec import AbstractFileSystem

from kettle.checkpoint.digest import BLOCK_BYTES, DIGEST_BYTES, ObjectDigest, block_digest
from kettle.checkpoint.durable import DurableLocalFileSystem, read_exactly
from kettle.errors import TornCheckpointError

# A window of 8 MiB touches 9 blocks at most, so that any of them fits.
_BATCH_BLOCKS = 10


Verify: TypeAlias = Literal["digests", "sizes"]
"""What is compared when a checkpoint is read: every byte by its digest, or only sizes."""


@dataclass(frozen=True)
class VerifiedFile:
    """A file, and what its blocks must be."""

    filesystem: AbstractFileSystem
    path: str
    digest: ObjectDigest
    uri: str
    verify: Verify


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

    Two threads take turns, this one among them: each block is hashed right after it was read, while
    it is in the cache, and meanwhile the other thread reads.

    Raises:
        TornCheckpointError: the file is missing, too short, or a block has other bytes. Memory
            that is read into straight away may hold these bytes then.
        OSError: of the store.
    """
    jobs = _chains(batches(ranges))
    turn = threading.Lock()
    failed = threading.Event()

    def take() -> list[Batch] | None:
        with turn:
            return None if failed.is_set() else next(jobs, None)

    def work() -> None:
        memory = memoryview(b"")
        try:
            while (chain := take()) is not None:
                memory = _enough(memory, chain)
                for before, job in pairwise((None, *chain)):
                    assert job is not None
                    _serve(file, job, before, memory)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(1, thread_name_prefix="kettle-verify") as pool:
        other = pool.submit(work)
        work()
    other.result()


def _chains(found: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Batches that need blocks from the one before stay together, and in one thread."""
    chain: list[Batch] = []
    for job in found:
        if chain and job.fresh == job.first:
            yield chain
            chain = []
        chain.append(job)
    if chain:
        yield chain


def _enough(memory: memoryview, chain: list[Batch]) -> memoryview:
    blocks = max((job.end - job.first for job in chain if job.into is None), default=0)
    size_bytes = blocks * BLOCK_BYTES
    return memory if len(memory) >= size_bytes else memoryview(bytearray(size_bytes))


def _serve(file: VerifiedFile, job: Batch, before: Batch | None, buffer: memoryview) -> None:
    """Read, verify and deliver a batch."""
    memory = buffer if job.into is None else job.into
    shift = job.first * BLOCK_BYTES
    start = job.fresh * BLOCK_BYTES
    end = min(job.end * BLOCK_BYTES, file.digest.size_bytes)
    if before is not None:
        # Blocks at the end of the batch before, which is still in the buffer.
        at = shift - before.first * BLOCK_BYTES
        memory[: start - shift] = memory[at : at + start - shift]
    # An object store is better asked once for all of it.
    local = isinstance(file.filesystem, DurableLocalFileSystem)
    step = BLOCK_BYTES if local else max(BLOCK_BYTES, end - start)
    for first in range(start, end, step):
        piece = memory[first - shift : min(first + step, end) - shift]
        _read(file, first, piece)
        if file.verify == "digests":
            _compare(file, first, piece)
    for part in job.ranges:
        assert part.deliver is not None
        part.deliver(memory[part.start - shift : part.end - shift])


def _read(file: VerifiedFile, start: int, memory: memoryview) -> None:
    try:
        read_exactly(file.filesystem, file.path, start, memory)
    except FileNotFoundError as error:
        raise TornCheckpointError(f"{file.uri}: {_name(file)} is missing") from error
    except EOFError as error:
        raise TornCheckpointError(
            f"{file.uri}: {_name(file)} is cut off: {error} and should have "
            f"{file.digest.size_bytes} bytes"
        ) from error


def _compare(file: VerifiedFile, start: int, memory: memoryview) -> None:
    for at in range(0, len(memory), BLOCK_BYTES):
        piece = memory[at : at + BLOCK_BYTES]
        block = (start + at) // BLOCK_BYTES
        found = block_digest(piece)
        expected = file.digest.blocks[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if found != expected:
            raise TornCheckpointError(
                f"{file.uri}: {_name(file)} is damaged in block {block} (bytes {start + at} to "
                f"{start + at + len(piece)}): it has the digest {found.hex()} and should have "
                f"{expected.hex()}"
            )


def _name(file: VerifiedFile) -> str:
    return file.path.rsplit("/", 1)[-1]
