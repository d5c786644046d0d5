"""JSONL logs to records: which files are read, and what is refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kettle.errors import EvidenceError
from kettle.records import Record, parse_line


def read_logs(paths: Sequence[Path]) -> list[Record]:
    """All records of one run, file by file in the order given, each file from its top.

    A folder stands for every `*.jsonl` below it, sorted by path. A file named twice is read once,
    so that `logs/ logs/a.jsonl` doubles no step. Lines that are no records are passed over.

    Raises:
        EvidenceError: a path can't be read or holds no record, or the logs belong to several runs.
    """
    records: list[Record] = []
    origin: dict[str, Path] = {}
    for file in _files(paths):
        found = _records_in(file)
        records += found
        for record in found:
            origin.setdefault(record.run_id, file)
    if len(origin) > 1:
        listing = "\n".join(f"  {run_id} in {file}" for run_id, file in sorted(origin.items()))
        raise EvidenceError(
            f"these logs belong to {len(origin)} runs:\n{listing}\n  name the logs of one run only"
        )
    if not records:
        raise EvidenceError("no log was named; name at least one JSONL file")
    return records


def _files(paths: Sequence[Path]) -> list[Path]:
    listed = [file for path in paths for file in _below(path)]
    unique = {file.resolve(): file for file in reversed(listed)}
    return list(reversed(unique.values()))


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    logs = sorted(path.rglob("*.jsonl"))
    if not logs:
        raise EvidenceError(f"{path} holds no *.jsonl file; name a folder with logs in it")
    yield from logs


def _records_in(file: Path) -> list[Record]:
    try:
        # A log cut off in the middle of a character is still evidence up to there.
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EvidenceError(
            f"can't read log {file}: {error.strerror or error}; name an existing JSONL file"
        ) from error
    records = [record for line in text.split("\n") if (record := parse_line(line)) is not None]
    if not records:
        raise EvidenceError(
            f"{file} holds no record; name what `kettle train` or `kettle launch` wrote to stdout"
        )
    return records
