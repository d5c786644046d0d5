"""The folder of a chaos run: what lies where, and what of an earlier one may be replaced."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from kettle.errors import UsageError

_MARKER = ".kettle-chaos"
_MARKER_TEXT = "kettle chaos replaces reference-*/, trial/, chaos.json and loss.* in this folder.\n"


@dataclass(frozen=True)
class Side:
    """The folder of one of the runs that are compared: two references and the trial."""

    title: str
    path: Path

    @property
    def checkpoint_root(self) -> str:
        """Its value for `checkpoint.root`."""
        return str(self.path / "checkpoints")

    def log(self, attempt: int) -> Path:
        """Records of an attempt, counted from 1."""
        return self.path / f"attempt-{attempt}.jsonl"

    def errors(self, attempt: int) -> Path:
        """What the attempt said on stderr."""
        return self.path / f"attempt-{attempt}.stderr"


@dataclass(frozen=True)
class Folder:
    """Where a chaos run writes; `out` is what `--out` says."""

    out: Path

    @property
    def references(self) -> tuple[Side, Side]:
        """The uninterrupted runs: twice the same, for the nondeterminism floor."""
        return (
            Side(title="reference 1 of 2", path=self.out / "reference-1"),
            Side(title="reference 2 of 2", path=self.out / "reference-2"),
        )

    @property
    def trial(self) -> Side:
        """The run that is evicted."""
        return Side(title="trial", path=self.out / "trial")

    @property
    def result(self) -> Path:
        """The documented JSON document."""
        return self.out / "chaos.json"

    @property
    def plots(self) -> tuple[Path, Path]:
        """The loss curves."""
        return self.out / "loss.png", self.out / "loss.svg"


def claim(out: Path) -> Folder:
    """Make `out` ready for a chaos run, removing what an earlier one wrote there and nothing else.

    Raises:
        UsageError: it is no folder, or holds something and was never used by a chaos run.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    marker = out / _MARKER
    if out.is_dir() and any(out.iterdir()) and not marker.is_file():
        raise UsageError(
            f"--out {out} is not empty and no chaos run wrote it; name another folder, "
            "or empty this one"
        )
    out.mkdir(parents=True, exist_ok=True)
    # First, so that a chaos run that is killed half way can be replaced too.
    marker.write_text(_MARKER_TEXT, encoding="utf-8")
    folder = Folder(out=out)
    sides = (*folder.references, folder.trial)
    for path in (*(side.path for side in sides), folder.result, *folder.plots):
        _remove(path)
    for side in sides:
        side.path.mkdir()
    return folder


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
