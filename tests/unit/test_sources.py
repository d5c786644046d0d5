import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from kettle.config import DataConfig
from kettle.data.sources import (
    BETWEEN_DOCUMENTS,
    Document,
    count_samples,
    cut,
    digest,
    read_documents,
)
from kettle.errors import DataError


def text(**options: object) -> DataConfig:
    return DataConfig.model_validate(
        {"source": "text", "include": "**/*.txt", "sequence_length": 4, **options}
    )


def read(path: Path, **options: object) -> list[Document]:
    return read_documents(text(**options), path=str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "a.txt").write_bytes(b"aaaa")
    (tmp_path / "deep" / "c.txt").write_bytes("é\r\n".encode())
    (tmp_path / "other.md").write_bytes(b"not included")
    return tmp_path


def test_folder_is_read_in_the_order_of_names(folder: Path) -> None:
    assert [d.name for d in read(folder)] == ["a.txt", "b.txt", "deep/c.txt"]


def test_glob_and_single_file_are_read(folder: Path) -> None:
    assert [d.name for d in read(folder / "*.txt")] == ["a.txt", "b.txt"]
    assert [d.content for d in read(folder / "a.txt")] == [b"aaaa"]


def test_content_is_taken_byte_for_byte(folder: Path) -> None:
    assert read(folder)[-1].content == b"\xc3\xa9\r\n"


def test_stream_of_bytes_and_separators_is_cut_evenly(folder: Path) -> None:
    tokens = cut(read(folder), text())
    stream = [*b"aaaa", BETWEEN_DOCUMENTS, *b"bb", BETWEEN_DOCUMENTS, *b"\xc3\xa9\r\n"]
    assert tokens.tolist() == [stream[:5], stream[5:10]]  # the rest fills no sample
    assert tokens.dtype == np.int64


def test_max_samples_takes_them_from_the_beginning(folder: Path) -> None:
    tokens = cut(read(folder), text(max_samples=1))
    assert tokens.tolist() == [[*b"aaaa", BETWEEN_DOCUMENTS]]


@pytest.mark.parametrize("max_samples", [None, 1, 2, 9])
def test_samples_are_counted_as_they_are_cut(folder: Path, max_samples: int | None) -> None:
    config = text(max_samples=max_samples)
    documents = read(folder)
    assert count_samples(documents, config) == len(cut(documents, config))


def test_moving_a_folder_keeps_the_digest(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    before = digest(read(folder))
    folder.rename(moved)
    assert digest(read(moved)) == before


@pytest.mark.parametrize(
    "documents",
    [
        [Document("a", b"xy")],
        [Document("b", b"x"), Document("c", b"y")],
        [Document("a", b"x")],
        [Document("a", b"y"), Document("b", b"x")],
        [],
    ],
)
def test_digest_notices_another_name_content_or_order(documents: list[Document]) -> None:
    assert digest(documents) != digest([Document("a", b"x"), Document("b", b"y")])


def test_standard_library_of_this_python_is_found() -> None:
    config = DataConfig(source="stdlib", sequence_length=64)
    documents = read_documents(config, path=None)
    names = {d.name for d in documents}
    assert {"abc.py", "json.py", "typing.py"} - names == {"json.py"}  # json is a package
    own = (Path(sysconfig.get_path("stdlib")) / "abc.py").read_bytes()
    assert next(d.content for d in documents if d.name == "abc.py") == own


def test_installed_packages_are_not_part_of_the_standard_library() -> None:
    config = DataConfig(source="stdlib", sequence_length=64, include="**/*.py")
    assert not [d.name for d in read_documents(config, path=None) if "site-packages" in d.name]


def test_folder_may_lie_below_one_that_is_called_site_packages(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"aaaa")
    assert [d.name for d in read(folder)] == ["a.txt"]


def test_name_that_is_not_utf8_is_digested(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"aaaa")
    assert len(digest(read(tmp_path))) == 64


def test_no_match_is_refused_with_pattern_and_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches '\*\*/\*\.txt' in .*; check"):
        read(tmp_path)


def test_text_shorter_than_a_sample_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"abc")
    with pytest.raises(DataError, match="has 4 tokens, and one sample takes 5"):
        cut(read(tmp_path), text())


def test_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"no file matches|can't read"):
        read(tmp_path)
