"""What kettle writes is read back bit by bit, on any number of ranks, or refused by name."""

import gc
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from kettle.checkpoint.digest import BLOCK_BYTES, Expected, ObjectDigest, verify_object
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.reader import CheckpointReader
from kettle.checkpoint.writer import CheckpointWriter, SaveCancelledError
from kettle.distributed import Ranks, barrier, process_group
from kettle.errors import CheckpointError, TornCheckpointError
from support.ranks import on_ranks
from support.s3 import as_s3_client, s3_server
from support.shards import DTYPES, bits, blank, cause, flip_bit, load, noise, positions, save

State = dict[str, Any]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with process_group("cpu", timeout_s=60) as ranks:
        yield ranks.control


@pytest.fixture(params=["durable", "local", "memory"])
def filesystem(request: pytest.FixtureRequest) -> AbstractFileSystem:
    if request.param == "durable":
        return DurableLocalFileSystem()
    options = {"auto_mkdir": True} if request.param == "local" else {}
    return fsspec.filesystem(request.param, **options)


def every_kind() -> State:
    """Small and large, every dtype, every layout that the writer and the reader tell apart."""
    kinds: State = {f"dtype.{dtype}": noise(33, 7, dtype=dtype) for dtype in DTYPES}
    kinds |= {f"scalar.{dtype}": noise(dtype=dtype) for dtype in DTYPES}
    return kinds | {
        "empty": noise(0, 5),
        "large": noise(1_500, 1_000),
        "large.odd": noise(70_001, dtype=torch.uint8),
        "transposed": noise(1_100, 2_100).t(),
        "narrow": noise(1_000, 1_300)[:, 100:900],
        "small.transposed": noise(10, 20).t(),
        "conjugate": noise(100_000, dtype=torch.complex64).conj(),
        "half.block": noise(BLOCK_BYTES // 2, dtype=torch.uint8),
        "block": noise(BLOCK_BYTES, dtype=torch.uint8),
        "tokens": noise(17, dtype=torch.int64),
        "nested": {"deep": {"weight": noise(300, 300, seed=1)}},
    }


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[prefix + name] = value
        else:
            found |= flat(value, f"{prefix}{name}.")
    return found


def blanks(state: Mapping[str, Any]) -> State:
    return {
        name: blank(value) if isinstance(value, torch.Tensor) else blanks(value)
        for name, value in state.items()
    }


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    left, right = flat(found), flat(expected)
    assert left.keys() == right.keys()
    wrong = [name for name in left if bits(left[name]) != bits(right[name])]
    assert wrong == []
    return True


def expected_of(objects: Mapping[str, ObjectDigest]) -> dict[str, Expected]:
    return {name: Expected(found.size_bytes, found.digest) for name, found in objects.items()}


# One rank.


def test_every_kind_of_tensor_comes_back_bit_by_bit(
    filesystem: AbstractFileSystem, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    state = every_kind()
    objects = save(filesystem, f"{tmp_path}/saved", state, group=group)
    assert set(objects) == {"__0_0.distcp", "metadata.json"}
    found = blanks(state)
    load(filesystem, f"{tmp_path}/saved", found, objects, group=group)
    assert same(found, state)


def test_every_object_is_what_the_writer_says(
    filesystem: AbstractFileSystem, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    objects = save(filesystem, f"{tmp_path}/saved", every_kind(), group=group)
    stored = filesystem.find(f"{tmp_path}/saved")
    assert {path.rsplit("/", 1)[-1] for path in stored} == set(objects)
    for path in stored:
        expected = expected_of(objects)[path.rsplit("/", 1)[-1]]
        verify_object(filesystem, path, expected, uri="x", progress=lambda _: None)


@pytest.mark.parametrize(
    "target",
    [
        noise(2_100, 1_100).t(),
        noise(1_100, 4_200)[:, 1_000:3_100],
        noise(1_100, 2_100, dtype=torch.float64),
        noise(1_100, 2_100).requires_grad_(),
    ],
    ids=["transposed", "narrow", "other dtype", "parameter"],
)
def test_target_of_any_layout_is_filled(
    tmp_path: Path, group: dist.ProcessGroup, target: torch.Tensor
) -> None:
    stored = torch.arange(1_100 * 2_100, dtype=torch.float32).reshape(1_100, 2_100)
    filesystem = DurableLocalFileSystem()
    objects = save(filesystem, f"{tmp_path}/saved", {"t": stored}, group=group)
    load(filesystem, f"{tmp_path}/saved", {"t": target}, objects, group=group)
    assert torch.equal(target.detach().to(torch.float32), stored)


def test_no_data_file_is_written_for_nothing(tmp_path: Path, group: dist.ProcessGroup) -> None:
    filesystem = DurableLocalFileSystem()
    assert set(save(filesystem, f"{tmp_path}/saved", {}, group=group)) == {"metadata.json"}


def test_target_of_another_shape_is_refused(tmp_path: Path, group: dist.ProcessGroup) -> None:
    filesystem = DurableLocalFileSystem()
    objects = save(filesystem, f"{tmp_path}/saved", {"t": noise(4, 4)}, group=group)
    with pytest.raises(CheckpointException):
        load(filesystem, f"{tmp_path}/saved", {"t": noise(4, 5)}, objects, group=group)


@pytest.mark.parametrize("value", [7, "text", None, [1, 2]])
def test_what_is_no_tensor_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, group: dist.ProcessGroup, value: object
) -> None:
    state = {"part": {"weight": noise(4), "count": value}}
    with pytest.raises(CheckpointException) as refused:
        save(DurableLocalFileSystem(), f"{tmp_path}/saved", state, group=group)
    assert isinstance(cause(refused.value), CheckpointError)
    assert "part.count" in str(cause(refused.value))
    assert list(tmp_path.iterdir()) == []


def test_save_in_another_thread_is_the_same_save(tmp_path: Path, group: dist.ProcessGroup) -> None:
    # torch's staging loses that a tensor is conjugate.
    state = {name: value for name, value in every_kind().items() if name != "conjugate"}
    filesystem = DurableLocalFileSystem()
    writer = CheckpointWriter(filesystem, f"{tmp_path}/saved")
    dcp.async_save(dict(state), storage_writer=writer, process_group=group).result()  # type: ignore[union-attr]
    found = blanks(state)
    load(filesystem, f"{tmp_path}/saved", found, writer.objects, group=group)
    assert same(found, state)


def test_saving_leaves_the_metadata_of_torch_alone(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    writer = CheckpointWriter(DurableLocalFileSystem(), f"{tmp_path}/saved")
    metadata = dcp.save({"t": noise(4)}, storage_writer=writer, process_group=group)
    assert metadata.storage_data is None


# Damage.


@pytest.fixture
def saved(tmp_path: Path, group: dist.ProcessGroup) -> tuple[Path, Mapping[str, ObjectDigest]]:
    folder = tmp_path / "saved"
    return folder, save(DurableLocalFileSystem(), str(folder), every_kind(), group=group)


def refusal(
    folder: Path,
    objects: Mapping[str, ObjectDigest],
    group: dist.ProcessGroup,
    state: State | None = None,
) -> str:
    """Why loading was refused, as the first rank says it."""
    into = blanks(every_kind()) if state is None else state
    with pytest.raises(CheckpointException) as refused:
        load(DurableLocalFileSystem(), str(folder), into, objects, group=group)
    error = cause(refused.value)
    assert isinstance(error, TornCheckpointError), repr(error)
    return str(error)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_every_flipped_bit_is_noticed(tmp_path: Path, group: dist.ProcessGroup, name: str) -> None:
    folder = tmp_path / "saved"
    state = {"large": noise(1_500, 500), "odd": noise(99_999, dtype=torch.uint8)}
    state |= {f"small.{number}": noise(number, seed=number) for number in range(20)}
    objects = save(DurableLocalFileSystem(), str(folder), state, group=group)
    found = blanks(state)
    for position in positions(folder / name, count=100, seed=7):
        flip_bit(folder / name, position)
        assert name in refusal(folder, objects, group, found)
        with pytest.raises(TornCheckpointError, match=name):
            verify_object(
                DurableLocalFileSystem(),
                f"{folder}/{name}",
                expected_of(objects)[name],
                uri="x",
                progress=lambda _: None,
            )
        flip_bit(folder / name, position)
    load(DurableLocalFileSystem(), str(folder), found, objects, group=group)
    assert same(found, state)


def test_damage_is_named_with_checkpoint_object_and_place(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup
) -> None:
    folder, objects = saved
    flip_bit(folder / "__0_0.distcp", (3 * BLOCK_BYTES + 5) * 8)
    assert refusal(folder, objects, group).startswith(
        "the-checkpoint: __0_0.distcp is damaged in block 3 (bytes 3145728 to 4194304): it has"
    )


def test_zeroed_page_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup
) -> None:
    folder, objects = saved
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 8192)
        file.write(bytes(4096))
    assert "__0_0.distcp is damaged in block 2" in refusal(folder, objects, group)


def test_swapped_blocks_are_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup
) -> None:
    folder, objects = saved
    content = (folder / "__0_0.distcp").read_bytes()
    first, second, rest = (content[i * BLOCK_BYTES :][:BLOCK_BYTES] for i in range(3))
    (folder / "__0_0.distcp").write_bytes(second + first + rest + content[3 * BLOCK_BYTES :])
    assert "__0_0.distcp is damaged in block" in refusal(folder, objects, group)


@pytest.mark.parametrize("left", [0, 1, BLOCK_BYTES, -1])
def test_truncated_object_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup, left: int
) -> None:
    folder, objects = saved
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content[:left])
    assert "__0_0.distcp is cut off" in refusal(folder, objects, group)


def test_truncated_metadata_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup
) -> None:
    folder, objects = saved
    content = (folder / "metadata.json").read_bytes()
    (folder / "metadata.json").write_bytes(content[: len(content) // 2])
    assert "metadata.json has" in refusal(folder, objects, group)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_missing_object_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup, name: str
) -> None:
    folder, objects = saved
    (folder / name).unlink()
    assert f"the-checkpoint: {name} is missing" in refusal(folder, objects, group)


def test_object_of_another_step_with_the_same_layout_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], tmp_path: Path, group: dist.ProcessGroup
) -> None:
    folder, objects = saved
    other = every_kind() | {"large": noise(1_500, 1_000, seed=9)}
    save(DurableLocalFileSystem(), f"{tmp_path}/other", other, group=group)
    (tmp_path / "other" / "__0_0.distcp").rename(folder / "__0_0.distcp")
    assert "__0_0.distcp is damaged" in refusal(folder, objects, group)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_marker_that_does_not_agree_with_the_metadata_is_noticed(
    saved: tuple[Path, Mapping[str, ObjectDigest]], group: dist.ProcessGroup, name: str
) -> None:
    folder, objects = saved
    other = ObjectDigest(objects[name].size_bytes, "xxh3-128-1m:" + "0" * 32, b"")
    assert f"{name} has the digest" in refusal(folder, {**objects, name: other}, group)
    longer = ObjectDigest(objects[name].size_bytes + 1, objects[name].digest, b"")
    assert f"{name} has" in refusal(folder, {**objects, name: longer}, group)
    without = {key: value for key, value in objects.items() if key != name}
    assert f"marker doesn't name {name}" in refusal(folder, without, group)


# A part of a record.


class Recording(DurableLocalFileSystem):
    """Notes which bytes are read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        self.reads.append((offset, offset + len(view)))
        super().read_into(path, offset, view)


class Into(DefaultLoadPlanner):
    """Hands out one target for whatever is read."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.storage_index.fqn == "t"
        return self._target


def read_box(
    filesystem: DurableLocalFileSystem,
    folder: str,
    objects: Mapping[str, ObjectDigest],
    starts: list[int],
    target: torch.Tensor,
) -> None:
    reader = CheckpointReader(filesystem, folder, objects=expected_of(objects), uri="x")
    reader.set_up_storage_reader(reader.read_metadata(), True)  # noqa: FBT003 - torch's
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("t"),
        dest_offsets=torch.Size([0] * len(starts)),
        storage_index=MetadataIndex("t", [0] * len(starts)),
        storage_offsets=torch.Size(starts),
        lengths=target.shape,
    )
    reader.read_data(LoadPlan([item]), Into(target)).wait()


SHAPES = [(1_000_001,), (300, 1_300, 3), (5, 450_000), (40, 3, 25_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partial_read_reads_no_block_in_vain_and_none_twice(
    tmp_path: Path, group: dist.ProcessGroup, shape: tuple[int, ...]
) -> None:
    stored = noise(*shape)
    filesystem = Recording()
    state = {"before": noise(50_000), "t": stored}
    objects = save(filesystem, f"{tmp_path}/saved", state, group=group)
    reader = CheckpointReader(
        filesystem, f"{tmp_path}/saved", objects=expected_of(objects), uri="x"
    )
    contents = reader.read_metadata().storage_data
    record = contents.chunks[MetadataIndex("t", [0] * len(shape))].record
    # The number of the block in which each element begins and ends.
    first = (record.offset + torch.arange(stored.numel()) * 4) // BLOCK_BYTES
    last = (record.offset + torch.arange(stored.numel()) * 4 + 3) // BLOCK_BYTES
    chosen = random.Random(1)
    for _ in range(10):
        starts = [chosen.randrange(size) for size in shape]
        lengths = [
            chosen.randint(1, size - start) for size, start in zip(shape, starts, strict=True)
        ]
        box = tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))
        target = torch.zeros(lengths)
        filesystem.reads.clear()
        read_box(filesystem, f"{tmp_path}/saved", objects, starts, target)
        assert bits(target) == bits(stored[box])
        used = torch.zeros(int(last.max()) + 1, dtype=torch.bool)
        for ends in (first, last):
            used[ends.reshape(shape)[box].reshape(-1)] = True
        read = [
            block
            for start, end in filesystem.reads
            for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        ]
        assert sorted(read) == used.nonzero().reshape(-1).tolist()


def test_partial_read_of_a_run_of_bytes_reads_two_more_blocks_at_most(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    filesystem = Recording()
    objects = save(filesystem, f"{tmp_path}/saved", {"t": noise(5_000_000)}, group=group)
    target = torch.zeros(3_000_000)
    filesystem.reads.clear()
    read_box(filesystem, f"{tmp_path}/saved", objects, [123_457], target)
    count = sum(end - start for start, end in filesystem.reads)
    assert target.nbytes <= count <= target.nbytes + 2 * BLOCK_BYTES


# Saves that fail.


class Failing(DurableLocalFileSystem):
    """Fails at the second MiB of a data file, or when metadata is written."""

    cachable = False

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode != "wb" or self.at not in path:
            return file
        write = file.write

        def fail(data: memoryview) -> int:
            if file.tell():
                raise OSError("the disk is full")
            return int(write(data))

        file.write = fail
        return file

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if self.at in path:
            raise OSError("the disk is full")
        super().pipe_file(path, value, mode, **options)


class FailingMemory(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory whose files fail at the second MiB."""

    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the base class, but not shared with it
    pseudo_dirs = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        file = super()._open(path, mode, *args, **options)
        if mode == "wb":
            write = file.write

            def fail(data: memoryview) -> int:
                if file.tell():
                    raise OSError("the disk is full")
                return int(write(data))

            file.write = fail
        return file


@pytest.mark.parametrize("at", ["__0_0.distcp", "metadata.json"])
def test_failing_store_is_reported_and_nothing_half_written_remains(
    tmp_path: Path, group: dist.ProcessGroup, at: str
) -> None:
    with pytest.raises(CheckpointException) as refused:
        save(Failing(at), f"{tmp_path}/saved", every_kind(), group=group)
    assert isinstance(cause(refused.value), OSError)
    assert "the disk is full" in str(cause(refused.value))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == (
        [] if at == "__0_0.distcp" else ["__0_0.distcp"]
    )


def test_failing_store_in_memory_keeps_nothing_half_written(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    filesystem = FailingMemory()
    with pytest.raises(CheckpointException):
        save(filesystem, f"{tmp_path}/saved", every_kind(), group=group)
    assert filesystem.find(f"{tmp_path}/saved") == []


def test_cancelled_save_ends_at_the_next_block_and_leaves_nothing(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    cancelled = threading.Event()

    class Slow(DurableLocalFileSystem):
        cachable = False
        written = 0

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            file = super()._open(path, mode, **options)
            write = file.write

            def counted(data: memoryview) -> int:
                Slow.written += 1
                if Slow.written == 3:
                    cancelled.set()
                return int(write(data))

            file.write = counted
            return file

    with pytest.raises(CheckpointException) as refused:
        save(Slow(), f"{tmp_path}/saved", every_kind(), group=group, cancelled=cancelled)
    assert isinstance(cause(refused.value), SaveCancelledError)
    assert Slow.written == 3
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AbstractFileSystem, str]]:
    as_s3_client(monkeypatch)
    with s3_server() as server:
        filesystem = fsspec.filesystem("s3", endpoint_url=server.endpoint)
        filesystem.mkdir(server.bucket)
        yield filesystem, server.bucket


def test_checkpoint_in_an_object_store_comes_back_and_is_verified(
    bucket: tuple[AbstractFileSystem, str], group: dist.ProcessGroup
) -> None:
    filesystem, name = bucket
    state = every_kind()
    objects = save(filesystem, f"{name}/saved", state, group=group)
    found = blanks(state)
    load(filesystem, f"{name}/saved", found, objects, group=group)
    assert same(found, state)
    data = f"{name}/saved/__0_0.distcp"
    content = bytearray(filesystem.cat_file(data))
    content[12_345] ^= 1
    filesystem.pipe_file(data, bytes(content))
    with pytest.raises(CheckpointException) as refused:
        load(filesystem, f"{name}/saved", found, objects, group=group)
    assert "__0_0.distcp is damaged in block 0" in str(cause(refused.value))


@pytest.mark.parametrize("size", [2 << 20, 40 << 20], ids=["one request", "several parts"])
def test_cancelled_upload_leaves_no_object(
    bucket: tuple[AbstractFileSystem, str],
    group: dist.ProcessGroup,
    size: int,
) -> None:
    class AtTheEnd(threading.Event):
        """Is set when the last MiB is due."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks >= size >> 20

    filesystem, name = bucket
    state = {"t": torch.zeros(size, dtype=torch.uint8)}
    with pytest.raises(CheckpointException) as refused:
        save(filesystem, f"{name}/saved", state, group=group, cancelled=AtTheEnd())
    assert isinstance(cause(refused.value), SaveCancelledError)
    gc.collect()
    filesystem.invalidate_cache()
    assert filesystem.find(name) == []
    assert filesystem.list_multipart_uploads(name) == []


# Several ranks.


def shards(full: Mapping[str, torch.Tensor], mesh: DeviceMesh, dims: Mapping[str, int]) -> State:
    """Each tensor's part of this rank, along its dimension; what has none is on every rank."""
    found: State = {}
    for name, tensor in full.items():
        if name not in dims:
            found[name] = DTensor.from_local(tensor.clone(), mesh, [Replicate()])
            continue
        parts = tensor.chunk(mesh.size(), dims[name])
        rank = mesh.get_local_rank()
        local = parts[rank] if rank < len(parts) else tensor.narrow(dims[name], 0, 0)
        found[name] = DTensor.from_local(
            local.clone(),
            mesh,
            [Shard(dims[name])],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return found


def sharded() -> dict[str, torch.Tensor]:
    kinds = {f"dtype.{dtype}": noise(7, 5, dtype=dtype) for dtype in DTYPES}
    return kinds | {
        "large": noise(1_031, 897),
        "deep": noise(70, 31, 303),
        "few.rows": noise(2, 40_000),
        "vector": noise(200_003),
        "replicated": noise(300, 300),
        "scalar": noise(dtype=torch.int64),
    }


SAVED_ALONG = {name: 0 for name in sharded() if name not in ("replicated", "scalar")}
LOADED_ALONG = [
    SAVED_ALONG,
    {name: 0 if name == "vector" else 1 for name in SAVED_ALONG} | {"deep": 2, "replicated": 0},
]


def resharded(ranks: Ranks, saving: int, folder: str) -> list[str]:
    """Save on some ranks and load on 1, 2 and 3, along each choice of dimensions."""
    meshes = {count: DeviceMesh("cpu", list(range(count))) for count in (1, 2, 3)}
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 3)}
    full = sharded()
    objects: Mapping[str, ObjectDigest] = {}
    filesystem = DurableLocalFileSystem()
    if ranks.rank < saving:
        state = shards(full, meshes[saving], SAVED_ALONG)
        objects = save(filesystem, folder, state, group=groups[saving])
    told: list[Any] = [objects]
    dist.broadcast_object_list(told, src=0)
    wrong = []
    for loading in (1, 2, 3):
        for number, dims in enumerate(LOADED_ALONG):
            if ranks.rank >= loading:
                continue
            expected = shards(full, meshes[loading], dims)
            found = shards({n: blank(t) for n, t in full.items()}, meshes[loading], dims)
            load(filesystem, folder, found, told[0], group=groups[loading])
            wrong += [
                f"{name} on {loading} ranks, {number}"
                for name in full
                if bits(found[name].to_local()) != bits(expected[name].to_local())
            ]
    barrier(ranks)
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize("saving", [1, 2, 3])
def test_checkpoint_is_loaded_on_other_numbers_of_ranks_along_other_dimensions(
    tmp_path: Path, saving: int
) -> None:
    assert on_ranks(3, resharded, saving, f"{tmp_path}/saved") == [[], [], []]
    files = {f"__{rank}_0.distcp" for rank in range(saving)}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {*files, "metadata.json"}


def failures(ranks: Ranks, act: str, folder: str) -> dict[int, tuple[str, str]]:
    """What every rank hears of an error that one of them has: class and text by rank."""
    state = {f"own.{rank}": noise(300_000, seed=rank) for rank in range(ranks.world_size)}
    # Each rank saves a tensor of its own and loads that of its neighbour.
    own, other = (f"own.{(ranks.rank + step) % ranks.world_size}" for step in (0, 1))
    filesystem = Failing("__1_0.distcp") if act == "write" else DurableLocalFileSystem()
    told: list[Any] = [None]
    try:
        told[0] = save(filesystem, folder, {own: state[own]}, group=ranks.control)
        dist.broadcast_object_list(told, src=0, group=ranks.control)
        if ranks.is_first:
            name = {"shard": "__1_0.distcp", "metadata": "metadata.json"}[act]
            flip_bit(Path(folder) / name, 4321)
        barrier(ranks)
        load(filesystem, folder, {other: blank(state[other])}, told[0], group=ranks.control)
    except CheckpointException as error:
        return {
            rank: (type(raised).__name__, str(raised))
            for rank, (raised, _) in error.failures.items()
        }
    return {}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("act", "hit", "says"),
    [
        ("write", {1: "OSError"}, "the disk is full"),
        ("shard", {0: "TornCheckpointError"}, "__1_0.distcp is damaged in block 0"),
        ("metadata", dict.fromkeys(range(3), "TornCheckpointError"), "metadata.json has"),
    ],
)
def test_error_on_one_rank_is_raised_on_all(
    tmp_path: Path, act: str, hit: dict[int, str], says: str
) -> None:
    heard = on_ranks(3, failures, act, f"{tmp_path}/saved")
    for failed in heard:
        assert {rank: name for rank, (name, _) in failed.items()} == hit
        assert all(says in text for _, text in failed.values())
    if act == "write":
        names = {path.name for path in (tmp_path / "saved").iterdir()}
        assert names == {"__0_0.distcp", "__2_0.distcp"}
