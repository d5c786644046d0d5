from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kettle.checkpoint.digest import (
    BLOCK_BYTES,
    DigestStream,
    Expected,
    digest_of,
    root_of,
    verify_object,
)
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.errors import TornCheckpointError

CONTENT = bytes(range(251)) * 12_000  # 2.9 blocks


def test_digest_is_the_one_that_the_format_describes() -> None:
    blocks = [CONTENT[i : i + BLOCK_BYTES] for i in range(0, len(CONTENT), BLOCK_BYTES)]
    joined = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert digest_of(CONTENT) == "xxh3-128-1m:" + xxhash.xxh3_128_hexdigest(joined)


def test_digest_of_nothing_and_of_a_text_never_change() -> None:
    assert digest_of(b"") == "xxh3-128-1m:99aa06d3014798d86001c324468d497f"
    assert digest_of(b"kettle") == "xxh3-128-1m:68b9ccadf2a57ede3535957b0c1eac5e"


@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=6))
def test_digest_does_not_depend_on_the_pieces(cuts: list[int]) -> None:
    stream = DigestStream()
    view = memoryview(CONTENT)
    edges = [0, *sorted(cuts), len(CONTENT)]
    for start, end in pairwise(edges):
        stream.update(view[start:end])
    found = stream.finish()
    assert found.digest == digest_of(CONTENT)
    assert found.size_bytes == len(CONTENT)
    assert found.digest == root_of(found.blocks)
    assert len(found.blocks) == 16 * 3


@pytest.fixture(params=["durable", "memory"])
def filesystem(request: pytest.FixtureRequest) -> fsspec.AbstractFileSystem:
    if request.param == "durable":
        return DurableLocalFileSystem()
    return fsspec.filesystem("memory")


def expected_of(content: bytes) -> Expected:
    return Expected(len(content), digest_of(content))


def verify(filesystem: fsspec.AbstractFileSystem, path: str, expected: Expected) -> list[int]:
    told: list[int] = []
    verify_object(filesystem, path, expected, uri="the-checkpoint", progress=told.append)
    return told


def test_object_that_is_whole_is_read_to_its_end(
    filesystem: fsspec.AbstractFileSystem, tmp_path: object
) -> None:
    content = CONTENT * 6
    filesystem.pipe_file(f"{tmp_path}/object", content)
    told = verify(filesystem, f"{tmp_path}/object", expected_of(content))
    assert sum(told) == len(content)
    assert max(told) == 8 * BLOCK_BYTES


def test_empty_object_is_whole(filesystem: fsspec.AbstractFileSystem, tmp_path: object) -> None:
    filesystem.pipe_file(f"{tmp_path}/object", b"")
    assert sum(verify(filesystem, f"{tmp_path}/object", expected_of(b""))) == 0


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (CONTENT[:-1], rf"the-checkpoint: object has {len(CONTENT) - 1} bytes and should have"),
        (CONTENT + b"x", rf"object has {len(CONTENT) + 1} bytes and should have {len(CONTENT)}"),
        (CONTENT[:-1] + b"x", r"object has the digest xxh3-128-1m:\w+ and should have"),
        (
            CONTENT[BLOCK_BYTES : 2 * BLOCK_BYTES]
            + CONTENT[:BLOCK_BYTES]
            + CONTENT[2 * BLOCK_BYTES :],
            r"object has the digest",
        ),
    ],
    ids=["shorter", "longer", "other byte", "swapped blocks"],
)
def test_damaged_object_is_refused_by_name(
    filesystem: fsspec.AbstractFileSystem, tmp_path: object, found: bytes, says: str
) -> None:
    filesystem.pipe_file(f"{tmp_path}/object", found)
    with pytest.raises(TornCheckpointError, match=says):
        verify(filesystem, f"{tmp_path}/object", expected_of(CONTENT))


def test_missing_object_is_refused_by_name(
    filesystem: fsspec.AbstractFileSystem, tmp_path: object
) -> None:
    with pytest.raises(TornCheckpointError, match="the-checkpoint: object is missing"):
        verify(filesystem, f"{tmp_path}/object", expected_of(CONTENT))


def test_object_that_shrinks_while_it_is_read_is_cut_off(tmp_path: object) -> None:
    class Shrinking(DurableLocalFileSystem):
        def read_into(self, path: str, offset: int, view: memoryview) -> None:
            with Path(path).open("r+b") as file:
                file.truncate(100)
            super().read_into(path, offset, view)

    filesystem = Shrinking()
    filesystem.pipe_file(f"{tmp_path}/object", CONTENT)
    with pytest.raises(TornCheckpointError, match="object is cut off: it has no byte 100"):
        verify(filesystem, f"{tmp_path}/object", expected_of(CONTENT))
