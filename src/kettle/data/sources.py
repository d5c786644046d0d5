"""Rows in: the files that a run reads, their digest, and the samples they are cut into.

No torch here: `kettle config fingerprint` needs the digest on a laptop.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kettle.config import DataConfig
from kettle.errors import DataError

Tokens: TypeAlias = NDArray[np.int64]

BETWEEN_DOCUMENTS = 256
"""The token after each document; 0 to 255 are the bytes themselves."""


@dataclass(frozen=True)
class Document:
    """One file of text."""

    name: str
    content: bytes


def read_documents(config: DataConfig, *, path: str | None) -> list[Document]:
    """The documents in a fixed order; `path` as runtime.data_path, None for the standard library.

    Raises:
        DataError: nothing matches, or a file can't be read.
    """
    folder = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
    if folder.is_dir():
        asked = f"{config.include!r} in {folder.absolute()}"
        paths = _below(folder, config.include)
    else:
        asked = str(folder.absolute())
        matches = map(Path, glob.glob(str(folder), recursive=True))  # noqa: PTH207 - may be absolute
        paths = sorted(match for match in matches if match.is_file())
        folder = folder.parent
    if not paths:
        raise DataError(
            f"no file matches {asked}; check runtime.data_path and experiment.data.include"
        )
    return [_read(found, folder=folder) for found in paths]


def digest(documents: Sequence[Document]) -> str:
    """SHA-256 (64 hex digits) over names and contents: another Python's library has another."""
    total = hashlib.sha256()
    for document in documents:
        content = hashlib.sha256(document.content).hexdigest()
        line = f"{document.name}\0{len(document.content)}\0{content}\n"
        total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def count_samples(documents: Sequence[Document], config: DataConfig) -> int:
    """How many samples the documents are cut into.

    Raises:
        DataError: they don't fill one sample.
    """
    tokens = sum(len(document.content) + 1 for document in documents)
    width = config.sequence_length + 1
    if tokens < width:
        raise DataError(
            f"the text has {tokens} tokens, and one sample takes {width}; "
            "add data or shorten experiment.data.sequence_length"
        )
    return min(tokens // width, config.max_samples or tokens)


def cut(documents: Sequence[Document], config: DataConfig) -> Tokens:
    """Samples [samples, sequence_length + 1], int64: the stream of all documents, cut evenly.

    A sample holds one token more than the model sees, because the last one is only a label. The
    rest of the stream that fills no sample is dropped.

    Raises:
        DataError: the documents don't fill one sample.
    """
    samples = count_samples(documents, config)
    pieces = []
    for document in documents:
        pieces.append(np.frombuffer(document.content, dtype=np.uint8).astype(np.int64))
        pieces.append(np.array([BETWEEN_DOCUMENTS], dtype=np.int64))
    width = config.sequence_length + 1
    return np.concatenate(pieces)[: samples * width].reshape(samples, width)


def _below(folder: Path, pattern: str) -> list[Path]:
    found = {path.relative_to(folder): path for path in folder.glob(pattern) if path.is_file()}
    # What pip installed or Python compiled is not the data's own text.
    own = [name for name in found if not {"site-packages", "__pycache__"} & set(name.parts)]
    return [found[name] for name in sorted(own, key=lambda name: name.as_posix())]


def _read(path: Path, *, folder: Path) -> Document:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}; fix it or leave it out") from error
    name = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
    return Document(name=name.as_posix(), content=content)
