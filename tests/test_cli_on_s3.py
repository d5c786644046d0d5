"""Looking at checkpoints in an object store, through its real client."""

import json
from collections.abc import Iterator

import fsspec
import pytest

from kettle.cli.app import run
from support.s3 import CountingServer, as_s3_client, s3_server
from support.saved import SavedRun


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingServer]:
    as_s3_client(monkeypatch)
    with s3_server() as running:
        monkeypatch.setenv("KETTLE_S3_ENDPOINT", running.endpoint)
        fsspec.config.conf["s3"] = {"endpoint_url": running.endpoint}
        filesystem, _ = fsspec.url_to_fs("s3://")
        filesystem.mkdir(running.bucket)
        yield running


@pytest.fixture
def saved(server: CountingServer) -> SavedRun:
    made = SavedRun(f"s3://{server.bucket}/root/tiny")
    for step in (2, 4):
        made.save(step)
    return made


def test_checkpoints_on_s3_are_listed(saved: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", "list", saved.uri, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(seen["step"], seen["verdict"]) for seen in found] == [
        (4, "committed"),
        (2, "committed"),
    ]


def test_listing_asks_s3_for_the_log_and_for_the_rest_once(
    server: CountingServer, saved: SavedRun
) -> None:
    start = len(server.requests)
    run(["checkpoints", "list", saved.uri])
    assert len(server.lists_since(start)) == 2


def test_checkpoints_on_s3_check_as_good(saved: SavedRun) -> None:
    assert run(["checkpoints", "check", saved.uri]) == 0


def test_checkpoints_on_s3_are_pruned(saved: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", "prune", saved.uri, "--keep", "1", "--yes"]) == 0
    capsys.readouterr()
    run(["checkpoints", "list", saved.uri, "--json"])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [seen["step"] for seen in found] == [4]


def test_s3_passes_every_check_of_the_doctor(
    server: CountingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", f"s3://{server.bucket}/root", "--skip-devices"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"ok"}


def test_the_doctor_leaves_nothing_on_s3(server: CountingServer) -> None:
    run(["doctor", f"s3://{server.bucket}/root", "--skip-devices"])
    filesystem, path = fsspec.url_to_fs(f"s3://{server.bucket}")
    filesystem.invalidate_cache()
    assert filesystem.find(path) == []


def test_a_bucket_that_is_not_there_is_a_problem(
    server: CountingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", f"s3://not-{server.bucket}/root", "--skip-devices"]) == 1
    assert "problem  writable" in capsys.readouterr().out
