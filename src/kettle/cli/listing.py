"""Checkpoints as lines of text, one each, which a pipe can cut and sort."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.filesize import decimal

from kettle.checkpoint.marker import Marker
from kettle.checkpoint.survey import Seen, Survey


def survey_lines(survey: Survey) -> Iterator[str]:
    """The run, then its checkpoints, the newest first."""
    claimed = f"generation {survey.generation} (attempt {survey.attempt_id}) is the newest"
    if not survey.generation:
        claimed = "no attempt has claimed it"
    yield f"{survey.run_id}: {claimed}; {_next_words(survey)}"
    head = ("step", "generation", "attempt", "size", "saved", "save ms", "folder", "verdict")
    yield from columns([head, *map(_row, survey.checkpoints)], right={0, 1, 3, 5})


def columns(rows: Sequence[Sequence[str]], *, right: set[int]) -> Iterator[str]:
    """Rows with cells padded to the width of their column; never wrapped or cut."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def verdict_words(checkpoint: Seen) -> str:
    """The verdict with its reason, on one line."""
    if checkpoint.reason is None:
        return checkpoint.verdict
    return f"{checkpoint.verdict}: {' '.join(checkpoint.reason.split())}"


def size_words(size_bytes: int) -> str:
    """A size for people."""
    return decimal(size_bytes)


def marker_rows(marker: Marker) -> list[tuple[str, str]]:
    """What a marker says of its checkpoint, the objects aside."""
    versions = ", ".join(f"{name} {version}" for name, version in marker.versions.items())
    return [
        ("run id", marker.run_id),
        ("fingerprint", marker.fingerprint),
        ("step", str(marker.step)),
        ("attempt", marker.attempt_id),
        ("generation", str(marker.generation)),
        ("ranks", str(marker.world_size)),
        ("device", marker.device_kind),
        ("saved", _moment(marker.saved_unix_s)),
        ("save ms", f"{marker.save_ms:.0f}"),
        ("size", f"{size_words(marker.size_bytes)} ({marker.size_bytes} bytes)"),
        ("format", str(marker.format_version)),
        ("versions", versions),
    ]


def _next_words(survey: Survey) -> str:
    following = survey.resumes_from
    if following.refusal is not None:
        return f"the next attempt ends with an error: {following.refusal}"
    if following.name is None:
        return "the next attempt begins at step 0"
    return f"the next attempt resumes from step {following.step} ({following.name})"


def _row(checkpoint: Seen) -> tuple[str, ...]:
    has_marker = checkpoint.saved_unix_s is not None
    return (
        str(checkpoint.step),
        str(checkpoint.generation),
        checkpoint.attempt_id,
        size_words(checkpoint.size_bytes),
        _moment(checkpoint.saved_unix_s) if has_marker else "-",
        f"{checkpoint.save_ms:.0f}" if has_marker else "-",
        checkpoint.name,
        verdict_words(checkpoint),
    )


def _moment(unix_s: float | None) -> str:
    if unix_s is None:
        return "-"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
