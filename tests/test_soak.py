"""A short run is killed at random instants, and ends as if nothing had happened."""

from pathlib import Path

import pytest

from support.soaking import Periodic, Store, soak

KINDS: list[tuple[Store, Periodic]] = [("file", "sync"), ("file", "async"), ("s3", "async")]


@pytest.mark.dist
@pytest.mark.parametrize(("store", "periodic"), KINDS)
def test_killed_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, periodic: Periodic
) -> None:
    monkeypatch.setattr("fsspec.config.conf", {})
    done = soak(store, periodic, tmp_path, seed=20, kills=range(7))
    assert done.faults == []
    assert done.kills == 7
    assert done.runs
