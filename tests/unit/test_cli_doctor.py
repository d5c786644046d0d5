import importlib.metadata
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kettle.checkpoint.probe import Finding, probe_store
from kettle.cli.app import run

RUN_FILE = str(Path(__file__).resolve().parents[2] / "examples" / "stdlib.toml")


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run(["doctor", *arguments, "--skip-devices", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {finding["about"]: finding for finding in findings}


def probed(filesystem: Any, root: str = "/doctor") -> dict[str, Finding]:
    return {finding.about: finding for finding in probe_store(filesystem, root, uri="memory://x")}


class Overwriting(MemoryFileSystem):  # type: ignore[misc]
    """A store that takes a conditional write for an ordinary one."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:  # noqa: ARG002
        super().pipe_file(path, value, mode="overwrite", **options)


class Forgetful(MemoryFileSystem):  # type: ignore[misc]
    """A store that gives back something else."""

    cachable = False

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:  # noqa: ARG002
        return b""


class Undeletable(MemoryFileSystem):  # type: ignore[misc]
    """A store that allows everything but to delete."""

    cachable = False

    def rm_file(self, path: str) -> None:
        raise PermissionError(f"not allowed to delete {path}")


class Late(MemoryFileSystem):  # type: ignore[misc]
    """A store whose clock is an hour behind."""

    cachable = False

    def modified(self, path: str) -> datetime:  # noqa: ARG002
        return datetime.fromtimestamp(time.time() - 3600, UTC)


def test_versions_are_those_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(capsys)["torch"] == {
        "about": "torch",
        "state": "ok",
        "text": importlib.metadata.version("torch"),
    }


def test_a_version_that_kettle_does_not_support_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name == "torch" else installed(name)
    )
    assert run(["doctor", "--skip-devices"]) == 1
    assert "problem  torch               1.0, and kettle needs" in capsys.readouterr().out


def without(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == library:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_client_that_no_store_needs_may_be_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without("gcsfs", monkeypatch)
    assert examined(capsys)["gcsfs"]["state"] == "ok"


def test_a_local_store_passes_every_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(tmp_path), "--skip-devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"ok"}


def test_nothing_stays_behind(tmp_path: Path) -> None:
    run(["doctor", str(tmp_path / "new" / "root"), "--skip-devices"])
    assert list(tmp_path.iterdir()) == []


def test_a_run_file_names_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"checkpoint.root={tmp_path}/root"
    run(["doctor", RUN_FILE, "--set", root, "--skip-devices", "--json"])
    assert json.loads(capsys.readouterr().out)["store"] == f"{tmp_path}/root"


def test_a_root_that_can_not_be_written_to_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert run(["doctor", str(tmp_path / "file" / "root"), "--skip-devices"]) == 1
    assert "correct the root, or give this process access" in capsys.readouterr().out


def test_an_unknown_kind_of_store_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "nope://bucket", "--skip-devices"]) == 1
    assert "can't open nope://bucket" in capsys.readouterr().out


def test_a_store_in_memory_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "memory://root", "--skip-devices"]) == 1
    assert "memory://root is gone when a process ends" in capsys.readouterr().out


def test_a_store_that_ignores_conditions_is_a_warning() -> None:
    assert probed(Overwriting())["conditional writes"].state == "warning"


def test_a_store_that_enforces_conditions_is_said_to() -> None:
    assert probed(MemoryFileSystem())["conditional writes"].state == "ok"


def test_a_store_that_gives_back_other_bytes_is_a_problem() -> None:
    assert probed(Forgetful())["readable"].state == "problem"


def test_a_store_that_forbids_to_delete_is_a_problem() -> None:
    assert probed(Undeletable())["deletable"].state == "problem"


def test_a_clock_that_is_an_hour_behind_is_a_warning() -> None:
    assert "3600 s behind this machine's" in probed(Late())["clock"].text


def test_nothing_is_asked_after_a_problem() -> None:
    assert "free space" not in probed(Undeletable())


def test_a_warning_alone_exits_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "url_to_fs", lambda _uri: (Overwriting(), "/doctor"))
    assert run(["doctor", "fake://x", "--skip-devices"]) == 0
    assert "warning  conditional writes" in capsys.readouterr().out


def test_devices_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor"])
    assert "devices" in [line.split()[1] for line in capsys.readouterr().out.splitlines()]


def test_a_run_file_that_can_not_be_read_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "absent.toml"]) == 2
    assert "can't read run file absent.toml" in capsys.readouterr().err


def test_an_override_without_a_run_file_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "--set", "checkpoint.keep=1"]) == 2
    assert "name RUN.toml" in capsys.readouterr().err


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--help"])
    assert "Example: kettle doctor " in capsys.readouterr().out


def test_a_look_without_devices_needs_no_torch(tmp_path: Path) -> None:
    program = "\n".join(
        [
            "import sys",
            "from kettle.cli.app import run",
            f"assert run(['doctor', {str(tmp_path)!r}, '--skip-devices']) == 0",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
