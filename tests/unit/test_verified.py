import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.checkpoint.digest import BLOCK_BYTES, DigestStream, ObjectDigest
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.verified import Batch, Range, VerifiedFile, batches, read_verified
from kettle.errors import TornCheckpointError

MIB = BLOCK_BYTES


def delivered(start: int, end: int) -> Range:
    return Range(start, end, into=None, deliver=lambda _: None)


def straight(start: int, end: int) -> Range:
    return Range(start, end, into=memoryview(bytearray(end - start)), deliver=None)


def blocks_read(found: list[Batch]) -> Counter[int]:
    return Counter(block for batch in found for block in range(batch.fresh, batch.end))


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 60 * MIB), st.integers(1, 8 * MIB)), min_size=1, max_size=30
    )
)
def test_every_block_that_is_touched_is_read_once(spans: list[tuple[int, int]]) -> None:
    ranges = [delivered(start, start + length) for start, length in spans]
    found = list(batches(ranges))
    touched = {block for part in ranges for block in range(part.start // MIB, -(-part.end // MIB))}
    assert blocks_read(found) == dict.fromkeys(touched, 1)
    assert [part for batch in found for part in batch.ranges] == sorted(
        ranges, key=lambda part: part.start
    )
    for batch in found:
        assert batch.first <= batch.fresh <= batch.end <= batch.first + 10
        for part in batch.ranges:
            assert batch.first * MIB <= part.start < part.end <= batch.end * MIB
    assert [batch.first for batch in found] == sorted(batch.first for batch in found)


def test_neighbours_share_the_block_between_them() -> None:
    # The end of one record and the beginning of the next, each with whole blocks on its far side.
    found = list(
        batches(
            [
                straight(0, 3 * MIB),
                delivered(3 * MIB, 3 * MIB + 100),
                delivered(3 * MIB + 4096, 4 * MIB),
                straight(4 * MIB, 6 * MIB),
            ]
        )
    )
    assert [(batch.first, batch.end, len(batch.ranges)) for batch in found] == [
        (0, 3, 0),
        (3, 4, 2),
        (4, 6, 0),
    ]


class Recording(DurableLocalFileSystem):
    """Notes what is read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        self.reads.append((offset, len(view)))
        super().read_into(path, offset, view)


def digest_of(content: bytes) -> ObjectDigest:
    stream = DigestStream()
    stream.update(memoryview(content))
    return stream.finish()


CONTENT = bytes(range(256)) * (12 * MIB // 256) + b"and an end"


def file_of(content: bytes, folder: Path) -> VerifiedFile:
    (folder / "file").write_bytes(content)
    return VerifiedFile(
        Recording(), f"{folder}/file", digest_of(CONTENT), "the-checkpoint", "digests"
    )


@given(
    spans=st.lists(
        st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(1, 8 * MIB)),
        min_size=1,
        max_size=8,
    )
)
def test_everybody_gets_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    file = file_of(CONTENT, tmp_path_factory.getbasetemp())
    got: dict[int, bytes] = {}

    def take(key: int, view: memoryview) -> None:
        got[key] = bytes(view)

    ends = [(start, min(start + length, len(CONTENT))) for start, length in spans]
    read_verified(
        file,
        [
            Range(start, end, into=None, deliver=partial(take, key))
            for key, (start, end) in enumerate(ends)
        ],
    )
    assert got == {key: CONTENT[start:end] for key, (start, end) in enumerate(ends)}


def test_damage_is_named_with_its_block(tmp_path: Path) -> None:
    damaged = bytearray(CONTENT)
    damaged[5 * MIB + 7] ^= 1
    file = file_of(bytes(damaged), tmp_path)
    says = r"the-checkpoint: file is damaged in block 5 \(bytes 5242880 to 6291456\): it has"
    with pytest.raises(TornCheckpointError, match=says):
        read_verified(file, [straight(0, 8 * MIB)])
    with pytest.raises(TornCheckpointError, match=says):
        read_verified(file, [delivered(6 * MIB - 1, 6 * MIB)])
    read_verified(file, [straight(0, 5 * MIB), delivered(6 * MIB, len(CONTENT))])


def test_nothing_of_a_damaged_block_is_delivered(tmp_path: Path) -> None:
    file = file_of(bytes(len(CONTENT)), tmp_path)
    got: list[bytes] = []
    with pytest.raises(TornCheckpointError, match="block 0"):
        read_verified(
            file, [Range(0, 100, into=None, deliver=lambda view: got.append(bytes(view)))]
        )
    assert got == []


def test_damage_ends_the_reading_soon(tmp_path: Path) -> None:
    file = file_of(bytes(len(CONTENT)), tmp_path)
    with pytest.raises(TornCheckpointError):
        read_verified(file, [straight(start, start + MIB) for start in range(0, 12 * MIB, MIB)])
    assert isinstance(file.filesystem, Recording)
    assert len(file.filesystem.reads) <= 6


def test_end_of_file_before_its_time_is_named(tmp_path: Path) -> None:
    file = file_of(CONTENT[:-3], tmp_path)
    with pytest.raises(TornCheckpointError, match=rf"file is cut off.*{len(CONTENT)} bytes"):
        read_verified(file, [straight(0, 8 * MIB), delivered(12 * MIB, len(CONTENT))])


def test_missing_file_is_named(tmp_path: Path) -> None:
    file = file_of(CONTENT, tmp_path)
    (tmp_path / "file").unlink()
    with pytest.raises(TornCheckpointError, match="the-checkpoint: file is missing"):
        read_verified(file, [straight(0, MIB)])


def test_error_of_whom_bytes_are_delivered_to_comes_back(tmp_path: Path) -> None:
    def refuse(_view: memoryview) -> None:
        raise MemoryError("no room for it")

    file = file_of(CONTENT, tmp_path)
    ranges = [
        Range(start, start + MIB, into=None, deliver=refuse) for start in range(0, 12 * MIB, MIB)
    ]
    with pytest.raises(MemoryError, match="no room for it"):
        read_verified(file, [*ranges, *ranges])


def test_no_thread_is_left(tmp_path: Path) -> None:
    file = file_of(bytes(len(CONTENT)), tmp_path)
    with pytest.raises(TornCheckpointError):
        read_verified(file, [straight(0, 8 * MIB)])
    assert not [thread for thread in threading.enumerate() if thread.name == "kettle-verify"]
