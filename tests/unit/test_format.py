import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from kettle.checkpoint.digest import DigestStream, ObjectDigest
from kettle.checkpoint.format import Contents, Record, decode, encode, place
from kettle.errors import CheckpointError
from support.shards import DTYPES


@given(lengths=st.lists(st.integers(0, 200_000), max_size=40))
def test_records_are_aligned_and_close_to_each_other(lengths: list[int]) -> None:
    placed = place(lengths)
    assert sorted(index for index, _ in placed) == list(range(len(lengths)))
    end = 0
    for index, offset in placed:
        alignment = 64 if lengths[index] <= 64 << 10 else 4096
        assert offset % alignment == 0
        assert 0 <= offset - end < alignment
        end = offset + lengths[index]
    large = [lengths[index] > 64 << 10 for index, _ in placed]
    assert not any(after and not before for before, after in pairwise(large))


def tensor(dtype: torch.dtype, *chunks: tuple[list[int], list[int]]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size([6, 4]),
        chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks],
    )


def file(content: bytes) -> ObjectDigest:
    stream = DigestStream()
    stream.update(memoryview(content))
    return stream.finish()


METADATA = Metadata(
    {"a.b": tensor(torch.bfloat16, ([0, 0], [4, 4]), ([4, 0], [2, 4]))},
    planner_data={"a.b": ("a", "b")},
)
RECORDS = {
    MetadataIndex("a.b", [0, 0]): Record("__0_0.distcp", 4096, 32),
    MetadataIndex("a.b", [4, 0]): Record("__1_0.distcp", 0, 16),
}
FILES = {"__0_0.distcp": file(b"x" * 5_000_000), "__1_0.distcp": file(b"y" * 16)}


def test_metadata_says_the_same_after_it_was_written() -> None:
    read = decode(encode(METADATA, RECORDS, FILES), uri="x")
    assert read.state_dict_metadata == METADATA.state_dict_metadata
    assert read.planner_data == METADATA.planner_data
    contents = read.storage_data
    assert isinstance(contents, Contents)
    assert contents.files == FILES
    assert {index: chunk.record for index, chunk in contents.chunks.items()} == RECORDS
    assert [chunk.sizes for chunk in contents.chunks.values()] == [(4, 4), (2, 4)]


def test_metadata_is_what_the_documentation_shows() -> None:
    document = json.loads(encode(METADATA, RECORDS, FILES))
    blocks = FILES["__1_0.distcp"].blocks.hex()
    assert document["files"]["__1_0.distcp"] == {"size_bytes": 16, "blocks": blocks}
    assert len(document["files"]["__0_0.distcp"]["blocks"]) == 5 * 32
    second = {
        "offsets": [4, 0],
        "sizes": [2, 4],
        "file": "__1_0.distcp",
        "offset": 0,
        "length": 16,
    }
    assert document["tensors"]["a.b"]["dtype"] == "bfloat16"
    assert document["tensors"]["a.b"]["shape"] == [6, 4]
    assert document["tensors"]["a.b"]["chunks"][1] == second
    assert (document["layout_version"], document["block_bytes"]) == (1, 1 << 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    index = MetadataIndex("t", [0, 0])
    metadata = Metadata({"t": tensor(dtype, ([0, 0], [6, 4]))})
    read = decode(encode(metadata, {index: Record("f", 0, 1)}, {}), uri="x")
    assert read.storage_data.chunks[index].dtype == dtype


def test_metadata_is_not_changed_by_writing_it() -> None:
    before = repr(METADATA)
    encode(METADATA, RECORDS, FILES)
    assert repr(METADATA) == before


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"a\.text is no tensor"):
        encode(Metadata({"a.text": BytesStorageMetadata()}), {}, {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout_version": 2}, "layout version 2, and this kettle reads 1"),
        ({"tensors": None}, "can't be understood"),
        ({"files": {"f": {}}}, "can't be understood"),
    ],
)
def test_metadata_of_another_version_is_refused(change: dict[str, object], says: str) -> None:
    document = json.loads(encode(METADATA, RECORDS, FILES)) | change
    with pytest.raises(CheckpointError, match=says):
        decode(json.dumps(document).encode(), uri="the-checkpoint")


def test_unknown_dtype_is_refused() -> None:
    content = encode(METADATA, RECORDS, FILES).replace(b'"bfloat16"', b'"float3_e1m1"')
    with pytest.raises(CheckpointError, match="float3_e1m1"):
        decode(content, uri="the-checkpoint")
