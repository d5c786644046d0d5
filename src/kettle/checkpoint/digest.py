"""What an object must be: its size and a digest of its bytes, block by block.

An object is cut at multiples of 1 MiB. Each block has an xxh3-128 digest of its own, so that a part
of the object can be verified without the rest, and the object's digest is the one over these:

    digest = "xxh3-128-1m:" + hex(xxh3_128(d0 + d1 + ... + dn)), where di = xxh3_128(block i)

This notices damage, not malice: xxh3 is no cryptographic hash.
"""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash
from fsspec import AbstractFileSystem

from kettle.checkpoint.durable import read_exactly
from kettle.errors import TornCheckpointError

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16

_GULP_BYTES = 8 * BLOCK_BYTES
_ALGORITHM = "xxh3-128-1m"


@dataclass(frozen=True)
class Expected:
    """What an object should be, as somebody trustworthy wrote down."""

    size_bytes: int
    digest: str


@dataclass(frozen=True)
class ObjectDigest:
    """What a finished object is.

    Attributes:
        digest: "xxh3-128-1m:" and 32 hexadecimal digits.
        blocks: the digests of its blocks, 16 bytes each.
    """

    size_bytes: int
    digest: str
    blocks: bytes


class DigestStream:
    """The digest of bytes that pass by, whatever pieces they come in.

    Pieces that end at block boundaries are hashed where they lie; nothing is ever copied.
    """

    def __init__(self) -> None:
        self._size_bytes = 0
        self._blocks = bytearray()
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0

    def update(self, view: memoryview) -> None:
        """Add the bytes that come next."""
        while len(view):
            piece = view[: BLOCK_BYTES - self._open_bytes]
            view = view[len(piece) :]
            self._size_bytes += len(piece)
            if len(piece) == BLOCK_BYTES:
                self._blocks += block_digest(piece)
                continue
            self._open.update(piece)
            self._open_bytes += len(piece)
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> ObjectDigest:
        """The digest of everything so far; nothing may be added afterwards."""
        if self._open_bytes:
            self._close_block()
        blocks = bytes(self._blocks)
        return ObjectDigest(self._size_bytes, root_of(blocks), blocks)

    def _close_block(self) -> None:
        self._blocks += self._open.digest()
        self._open.reset()
        self._open_bytes = 0


def block_digest(block: memoryview) -> bytes:
    """The 16 bytes that stand for one block."""
    return xxhash.xxh3_128_digest(block)


def root_of(blocks: bytes) -> str:
    """The digest of an object, from the digests of its blocks."""
    return f"{_ALGORITHM}:{xxhash.xxh3_128_hexdigest(blocks)}"


def digest_of(content: bytes) -> str:
    """The digest of an object that is in memory."""
    stream = DigestStream()
    stream.update(memoryview(content))
    return stream.finish().digest


def verify_object(
    filesystem: AbstractFileSystem,
    path: str,
    expected: Expected,
    *,
    uri: str,
    progress: Callable[[int], None],
) -> None:
    """Read a whole object and compare it with what it should be.

    Args:
        uri: the object or its checkpoint, as a message names it.
        progress: told the number of bytes after each piece that was read.

    Raises:
        TornCheckpointError: the object is missing, of another size, or has other bytes.
        OSError: the store can't be read.
    """
    name = path.rsplit("/", 1)[-1]
    try:
        found_bytes = filesystem.info(path)["size"]
        if found_bytes != expected.size_bytes:
            raise TornCheckpointError(
                f"{uri}: {name} has {found_bytes} bytes and should have {expected.size_bytes}"
            )
        stream = DigestStream()
        memory = memoryview(bytearray(min(_GULP_BYTES, expected.size_bytes)))
        for start in range(0, expected.size_bytes, _GULP_BYTES):
            piece = memory[: min(_GULP_BYTES, expected.size_bytes - start)]
            read_exactly(filesystem, path, start, piece)
            stream.update(piece)
            progress(len(piece))
    except FileNotFoundError as error:
        raise TornCheckpointError(f"{uri}: {name} is missing") from error
    except EOFError as error:
        raise TornCheckpointError(f"{uri}: {name} is cut off: {error}") from error
    found = stream.finish().digest
    if found != expected.digest:
        raise TornCheckpointError(
            f"{uri}: {name} has the digest {found} and should have {expected.digest}"
        )
