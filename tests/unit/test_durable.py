import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kettle.checkpoint.durable import DurableLocalFileSystem, read_exactly
from kettle.checkpoint.layout import PARTIAL

Log = list[tuple[str, str]]


@pytest.fixture
def filesystem() -> DurableLocalFileSystem:
    return DurableLocalFileSystem()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is asked of the kernel that a power cut would tell apart, with the paths; it is done."""
    asked: Log = []

    def record(name: str, path_of: Callable[..., str]) -> None:
        real = getattr(os, name)

        def recorded(*args: Any, **options: Any) -> Any:
            asked.append((name, path_of(*args)))
            return real(*args, **options)

        monkeypatch.setattr(os, name, recorded)

    record("fsync", lambda descriptor: str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    record("mkdir", lambda path: path)
    record("replace", lambda _, path: path)
    record("link", lambda _, path: path)
    return asked


def test_closed_file_lasts_with_its_name(
    filesystem: DurableLocalFileSystem, tmp_path: Path, log: Log
) -> None:
    with filesystem.open(f"{tmp_path}/file", "wb") as file:
        file.write(b"content")
        assert log == []
    assert log == [("fsync", f"{tmp_path}/file"), ("fsync", str(tmp_path))]


def test_new_folders_last_before_anything_is_in_them(
    filesystem: DurableLocalFileSystem, tmp_path: Path, log: Log
) -> None:
    filesystem.open(f"{tmp_path}/a/b/file", "wb").close()
    assert log == [
        ("mkdir", f"{tmp_path}/a"),
        ("fsync", str(tmp_path)),
        ("mkdir", f"{tmp_path}/a/b"),
        ("fsync", f"{tmp_path}/a"),
        ("fsync", f"{tmp_path}/a/b/file"),
        ("fsync", f"{tmp_path}/a/b"),
    ]


@pytest.mark.parametrize(("mode", "how"), [("overwrite", "replace"), ("create", "link")])
def test_object_lasts_before_it_has_its_name(
    filesystem: DurableLocalFileSystem, tmp_path: Path, log: Log, mode: str, how: str
) -> None:
    filesystem.pipe_file(f"{tmp_path}/object", b"content", mode=mode)
    (_, partial), *rest = log
    assert partial.startswith(f"{tmp_path}/.")
    assert partial.endswith(PARTIAL)
    assert rest == [(how, f"{tmp_path}/object"), ("fsync", str(tmp_path))]
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


def test_object_can_be_created_once_only(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    filesystem.pipe_file(f"{tmp_path}/object", b"first", mode="create")
    with pytest.raises(FileExistsError):
        filesystem.pipe_file(f"{tmp_path}/object", b"second", mode="create")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"object": b"first"}


def test_one_of_many_creates_an_object(filesystem: DurableLocalFileSystem, tmp_path: Path) -> None:
    start = threading.Barrier(8)
    made: list[int] = []

    def create(number: int) -> None:
        start.wait()
        try:
            filesystem.pipe_file(f"{tmp_path}/object", bytes([number]), mode="create")
        except FileExistsError:
            return
        made.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = made
    assert (tmp_path / "object").read_bytes() == bytes([winner])


def test_object_is_never_seen_in_part(filesystem: DurableLocalFileSystem, tmp_path: Path) -> None:
    contents = [bytes([number]) * 300_000 for number in range(5)]
    filesystem.pipe_file(f"{tmp_path}/object", contents[0])
    done = threading.Event()
    seen = set()

    def look() -> None:
        while not done.is_set():
            seen.add(filesystem.cat_file(f"{tmp_path}/object"))

    reader = threading.Thread(target=look)
    reader.start()
    for content in contents * 4:
        filesystem.pipe_file(f"{tmp_path}/object", content)
    done.set()
    reader.join()
    assert seen <= set(contents)


def test_object_is_created_once_where_there_are_no_hard_links(
    filesystem: DurableLocalFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_paths: str) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    filesystem.pipe_file(f"{tmp_path}/object", b"first", mode="create")
    with pytest.raises(FileExistsError):
        filesystem.pipe_file(f"{tmp_path}/object", b"second", mode="create")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"object": b"first"}


def test_object_whose_folder_is_a_file_leaves_nothing(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        filesystem.pipe_file(f"{tmp_path}/file/object", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_object_in_the_place_of_a_folder_leaves_no_partial_one(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "object").mkdir()
    with pytest.raises(IsADirectoryError):
        filesystem.pipe_file(f"{tmp_path}/object", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


# What is abandoned.


def left_with_an_error(file: Any) -> None:
    with pytest.raises(KeyError), file:
        raise KeyError


def discarded(file: Any) -> None:
    file.discard()
    file.close()


def forgotten(file: Any) -> None:
    del file


@pytest.mark.parametrize("abandon", [left_with_an_error, discarded, forgotten])
def test_abandoned_file_is_gone(
    filesystem: DurableLocalFileSystem, tmp_path: Path, abandon: Callable[[Any], None]
) -> None:
    # Nothing may keep a reference here: one test forgets the file.
    def begin() -> Any:
        file = filesystem.open(f"{tmp_path}/file", "wb", size_estimate=1 << 20)
        file.write(b"content")
        assert (tmp_path / "file").exists()
        return file

    abandon(begin())
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_file_that_can_not_be_made_to_last_is_gone(
    filesystem: DurableLocalFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    file = filesystem.open(f"{tmp_path}/file", "wb")
    file.write(b"content")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        file.close()
    assert list(tmp_path.iterdir()) == []
    assert file.closed


def test_file_that_finds_no_room_is_gone(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=r"space|large"):
        filesystem.open(f"{tmp_path}/file", "wb", size_estimate=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_closed_file_can_not_be_discarded(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    file = filesystem.open(f"{tmp_path}/file", "wb")
    file.close()
    file.discard()
    file.close()
    assert (tmp_path / "file").exists()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


# Sizes.


@pytest.mark.parametrize("size_estimate", [0, 10, 1_000, 1 << 20])
def test_file_is_as_long_as_what_was_written(
    filesystem: DurableLocalFileSystem, tmp_path: Path, size_estimate: int
) -> None:
    with filesystem.open(f"{tmp_path}/file", "wb", size_estimate=size_estimate) as file:
        assert file.write(b"x" * 600) == 600
        assert file.write(memoryview(b"y" * 400)) == 400
        assert file.tell() == 1_000
    assert (tmp_path / "file").read_bytes() == b"x" * 600 + b"y" * 400


def test_room_is_taken_at_once(filesystem: DurableLocalFileSystem, tmp_path: Path) -> None:
    with filesystem.open(f"{tmp_path}/file", "wb", size_estimate=1 << 20):
        assert (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20
    assert (tmp_path / "file").stat().st_size == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_store_that_reserves_no_room_is_written_to_all_the_same(
    filesystem: DurableLocalFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def refuse(*_arguments: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with filesystem.open(f"{tmp_path}/file", "wb", size_estimate=10) as file:
        file.write(b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_long_file_is_written_back_early_and_whole(
    filesystem: DurableLocalFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, parts = os.posix_fadvise, []

    def recorded(descriptor: int, offset: int, length: int, advice: int) -> None:
        parts.append((offset, length))
        real(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", recorded)
    piece = os.urandom(1 << 20)
    with filesystem.open(f"{tmp_path}/file", "wb") as file:
        for _ in range(70):
            file.write(piece)
    assert parts == [(0, 32 << 20), (32 << 20, 32 << 20)]
    assert (tmp_path / "file").read_bytes() == piece * 70


def test_exclusive_file_is_refused_where_there_is_one(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        filesystem.open(f"{tmp_path}/file", "xb")
    assert (tmp_path / "file").read_bytes() == b"old"


# Reading, and being a filesystem.


def test_bytes_are_read_into_memory(filesystem: DurableLocalFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    memory = bytearray(4)
    filesystem.read_into(f"{tmp_path}/file", 3, memoryview(memory))
    assert memory == b"3456"


def test_short_read_is_an_error(filesystem: DurableLocalFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with pytest.raises(EOFError, match="it has no byte 10"):
        read_exactly(filesystem, f"{tmp_path}/file", 8, memoryview(bytearray(4)))


def test_it_is_a_filesystem_like_any_other(
    filesystem: DurableLocalFileSystem, tmp_path: Path
) -> None:
    filesystem.makedirs(f"{tmp_path}/folder")
    filesystem.makedirs(f"{tmp_path}/folder", exist_ok=True)
    with pytest.raises(FileExistsError):
        filesystem.makedirs(f"{tmp_path}/folder")
    filesystem.pipe_file(f"file://{tmp_path}/folder/object", b"content")
    assert filesystem.cat_file(f"{tmp_path}/folder/object", start=1, end=3) == b"on"
    assert filesystem.find(str(tmp_path)) == [f"{tmp_path}/folder/object"]
    assert [entry["size"] for entry in filesystem.ls(f"{tmp_path}/folder", detail=True)] == [7]
    with filesystem.open(f"{tmp_path}/folder/object", "ab") as file:
        file.write(b" and more")
    with filesystem.open(f"{tmp_path}/folder/object") as file:
        assert file.read() == b"content and more"
    with filesystem.open(f"{tmp_path}/folder/text", "w") as file:
        file.write("text")
    assert filesystem.cat_file(f"{tmp_path}/folder/text") == b"text"
    filesystem.rm_file(f"{tmp_path}/folder/object")
    filesystem.rm(f"{tmp_path}/folder", recursive=True)
    assert list(tmp_path.iterdir()) == []
