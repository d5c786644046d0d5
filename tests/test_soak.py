"""A short run is killed at random instants, and ends as if nothing had happened."""

from pathlib import Path

import pytest

from support.soaking import Periodic, Store, soak

KINDS: list[tuple[Store, Periodic, int]] = [
    ("file", "sync", 7),
    ("file", "async", 7),
    ("s3", "async", 6),
]


@pytest.mark.dist
@pytest.mark.parametrize(("store", "periodic", "kills"), KINDS)
def test_killed_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, periodic: Periodic, kills: int
) -> None:
    monkeypatch.setattr("fsspec.config.conf", {})
    done = soak(store, periodic, tmp_path, seed=20, kills=range(kills))
    assert done.faults == []
    assert done.kills == kills
    assert done.runs
