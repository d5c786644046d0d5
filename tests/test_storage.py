"""Checkpoints in a store: found with one listing, whole or refused by name."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import Metadata

from kettle.checkpoint.catalog import look
from kettle.checkpoint.events import Committed, LogState, after
from kettle.checkpoint.filesystem import open_store, use_endpoint
from kettle.checkpoint.layout import LOG, MARKER, checkpoint_name, entry_name
from kettle.checkpoint.log import Entry, Lease, read_tail
from kettle.checkpoint.marker import read_marker
from kettle.checkpoint.protocol import Candidate, Skipped, candidates
from kettle.checkpoint.reader import CheckpointReader
from kettle.errors import CheckpointError
from kettle.records import CheckpointCommitted, CheckpointSkipped, RunCompleted
from kettle.train.run import Run
from support.attempts import Change, StopAt, alone, compared, forgetting, interrupted
from support.checkpoints import marker
from support.experiments import noise, tiny
from support.s3 import CountingServer, as_s3_client, s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingServer]:
    as_s3_client(monkeypatch)
    with s3_server() as server:
        use_endpoint(server.endpoint)
        open_store(f"s3://{server.bucket}")[0].mkdir(server.bucket)
        yield server


def filled(server: CountingServer, *, checkpoints: int) -> tuple[AbstractFileSystem, str]:
    """A run that has committed so many checkpoints, the newest of which is in order."""
    names = [checkpoint_name(step, generation=1, attempt_id="a") for step in range(checkpoints)]
    server.fill(
        f"run/{name}/{inside}"
        for name in names
        for inside in ("__0_0.distcp", "metadata.json", MARKER)
    )
    server.fill(f"run/{LOG}/{entry_name(n)}" for n in range(1, checkpoints + 2))
    newest = marker(
        step=checkpoints - 1,
        objects={
            name: {"size_bytes": 1, "digest": ""} for name in ("__0_0.distcp", "metadata.json")
        },
    )
    server.fill([f"run/{names[-1]}/{MARKER}"], content=newest.to_bytes())
    event = Committed(name=names[-1], marker=newest)
    entry = Entry(
        number=checkpoints + 1,
        generation=1,
        attempt_id="a",
        nonce="",
        written_unix_s=0.0,
        event=event,
        state=after(LogState(generation=1), event, number=checkpoints + 1, attempt_id="a"),
    )
    server.fill([f"run/{LOG}/{entry_name(entry.number)}"], content=entry.model_dump_json().encode())
    return open_store(f"s3://{server.bucket}/run")


def newest_of(filesystem: AbstractFileSystem, prefix: str) -> Candidate | Skipped | None:
    tail = read_tail(filesystem, prefix)
    lease = Lease(filesystem, prefix, uri=f"s3://{prefix}", attempt_id="b", tail=tail)
    return next(candidates(lease), None)


@pytest.mark.parametrize("checkpoints", [10, 200])
def test_latest_complete_costs_one_glob(s3: CountingServer, checkpoints: int) -> None:
    filesystem, prefix = filled(s3, checkpoints=checkpoints)
    before = len(s3.requests)
    tail = read_tail(filesystem, prefix)
    assert tail.state.newest == checkpoint_name(checkpoints - 1, generation=1, attempt_id="a")
    # One listing of the log, whatever the number of checkpoints and of shards, and one entry.
    assert len(s3.lists_since(before)) == 1, s3.requests[before:]
    assert len(s3.requests) - before == 2, s3.requests[before:]


def test_newest_checkpoint_is_looked_at_with_one_listing_and_one_read(s3: CountingServer) -> None:
    filesystem, prefix = filled(s3, checkpoints=30)
    before = len(s3.requests)
    newest = newest_of(filesystem, prefix)
    assert isinstance(newest, Candidate)
    assert newest.marker.step == 29
    assert len(s3.requests) - before == 4, s3.requests[before:]


def test_newest_of_ten_thousand_checkpoints_costs_a_listing_of_the_log_and_one_read(
    s3: CountingServer,
) -> None:
    filesystem, prefix = filled(s3, checkpoints=10_000)
    before = len(s3.requests)
    tail = read_tail(filesystem, prefix)
    assert tail.state.newest == checkpoint_name(9_999, generation=1, attempt_id="a")
    # A page holds 1,000 of the 10,001 entries.
    assert len(s3.lists_since(before)) == 11
    assert len(s3.requests) - before == 12


def test_writer_that_knows_the_log_reads_nothing_again(s3: CountingServer) -> None:
    filesystem, prefix = filled(s3, checkpoints=30)
    known = read_tail(filesystem, prefix)
    before = len(s3.requests)
    assert read_tail(filesystem, prefix, known=known) == known
    assert len(s3.requests) - before == 1


@pytest.mark.parametrize(("checkpoints", "requests"), [(10, 1), (200, 1), (400, 2)])
def test_listing_without_a_log_is_one_request_per_thousand_objects(
    s3: CountingServer, checkpoints: int, requests: int
) -> None:
    s3.fill(
        f"run/{checkpoint_name(step, generation=1, attempt_id='a')}/{name}"
        for step in range(checkpoints)
        for name in ("__0_0.distcp", "metadata.json", MARKER)
    )
    filesystem, prefix = open_store(f"s3://{s3.bucket}/run")
    before = len(s3.requests)
    folders = look(filesystem, prefix).folders
    assert [folder.place.step for folder in folders] == list(reversed(range(checkpoints)))
    assert len(s3.requests) - before == len(s3.lists_since(before)) == requests


@pytest.mark.parametrize("scheme", ["path", "file", "memory", "s3"])
def test_run_is_saved_to_and_resumed_from_any_store(
    tmp_path: Path, s3: CountingServer, scheme: str
) -> None:
    root = {
        "path": str(tmp_path),
        "file": f"file://{tmp_path}",
        "memory": f"memory://{tmp_path.name}",
        "s3": f"s3://{s3.bucket}/runs",
    }[scheme]
    reference = alone(tiny(tmp_path / "reference"), noise())
    first, second = interrupted(tiny(root), noise(), stops=[StopAt(4)])
    assert second.resumed_from == 3
    digests = [t.of(RunCompleted)[0].weights_digest for t in (reference, second)]
    assert digests[0] == digests[1]
    assert first.last_checkpoint.startswith(root)


def test_empty_store_has_no_checkpoint(tmp_path: Path) -> None:
    filesystem, prefix = open_store(str(tmp_path / "nothing"))
    assert newest_of(filesystem, prefix) is None


def test_foreign_folders_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    old, new = "step-00000004-g0001-x", "step-00000008-g0001-x"
    for name in ("step-1", "final", f"backup/{old}", f"{old}/{new}", "step-00000009-x"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / MARKER).write_text("x")
    filesystem, path = open_store(str(tmp_path))
    assert look(filesystem, path).folders == []


# Torn writes.


def saved_twice(root: Path) -> tuple[Path, Path]:
    """A run that was evicted after step 5 and had saved step 3: the older and the newer folder."""
    told = alone(tiny(root, checkpoint__every=3), noise(), stop=StopAt(6))
    older, newer = (Path(c.checkpoint_uri) for c in told.of(CheckpointCommitted))
    return older, newer


def without_marker(newer: Path) -> None:
    (newer / MARKER).unlink()


def empty_marker(newer: Path) -> None:
    (newer / MARKER).write_bytes(b"")


def half_a_marker(newer: Path) -> None:
    content = (newer / MARKER).read_bytes()
    (newer / MARKER).write_bytes(content[: len(content) // 2])


def truncated_shard(newer: Path) -> None:
    shard = next(newer.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def missing_shard(newer: Path) -> None:
    next(newer.glob("*.distcp")).unlink()


def missing_metadata(newer: Path) -> None:
    (newer / "metadata.json").unlink()


def flipped_bit(newer: Path) -> None:
    shard = next(newer.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


TEARS = [
    without_marker,
    empty_marker,
    half_a_marker,
    truncated_shard,
    missing_shard,
    missing_metadata,
    flipped_bit,
]


@pytest.mark.parametrize("tear", TEARS)
def test_resume_falls_back_past_a_torn_write(tmp_path: Path, tear: Callable[[Path], None]) -> None:
    reference = alone(tiny(tmp_path / "reference"), noise())
    _, newer = saved_twice(tmp_path / "trial")
    tear(newer)
    resumed = alone(tiny(tmp_path / "trial"), noise(), name="after")
    assert resumed.resumed_from == 3
    assert compared(reference, resumed).identical


def test_flipped_bit_is_noticed_unless_only_sizes_are_compared(tmp_path: Path) -> None:
    _, newer = saved_twice(tmp_path)
    flipped_bit(newer)
    only_sizes = tiny(tmp_path, checkpoint__verify="sizes")
    assert alone(only_sizes, noise(), name="after", stop=StopAt(6)).resumed_from == 5
    assert alone(tiny(tmp_path), noise(), name="later").resumed_from == 3


@pytest.mark.parametrize("tear", TEARS[1:])
def test_torn_checkpoint_is_reported_with_its_reason(
    tmp_path: Path, tear: Callable[[Path], None]
) -> None:
    _, newer = saved_twice(tmp_path)
    tear(newer)
    resumed = alone(tiny(tmp_path), noise(), name="after")
    (skipped,) = resumed.of(CheckpointSkipped)
    assert skipped.checkpoint_uri == str(newer)
    assert (
        "marker" in skipped.reason
        or "bytes" in skipped.reason
        or "missing" in skipped.reason
        or "damaged" in skipped.reason
    )


def test_debris_of_a_killed_save_is_not_part_of_the_next_one(tmp_path: Path) -> None:
    _, newer = saved_twice(tmp_path / "trial")
    without_marker(newer)
    (newer / "__7_0.distcp").write_bytes(b"a shard of a rank that is gone")
    resumed = alone(tiny(tmp_path / "trial"), noise(), name="after", stop=StopAt(6))
    marker = json.loads((Path(resumed.last_checkpoint) / MARKER).read_text())
    assert Path(resumed.last_checkpoint) != newer
    assert "__7_0.distcp" not in marker["objects"]


# Keys.


def without_part(name: str) -> Change:
    def change(run: Run) -> Run:
        parts = {key: part for key, part in run.parts.items() if key != name}
        return dataclasses.replace(run, parts=parts)

    return change


def test_foreign_key_on_load_is_an_error_that_names_it(tmp_path: Path) -> None:
    alone(tiny(tmp_path), noise(), stop=StopAt(3))
    with pytest.raises(CheckpointError, match=r"foreign +scheduler\.finished, scheduler\.lr"):
        alone(tiny(tmp_path), noise(), change=without_part("scheduler"))


def test_missing_key_on_load_is_an_error_that_names_it(tmp_path: Path) -> None:
    alone(tiny(tmp_path), noise(), stop=StopAt(3), change=without_part("scheduler"))
    with pytest.raises(CheckpointError, match=r"missing +scheduler\.finished, scheduler\.lr"):
        alone(tiny(tmp_path), noise())


def metadata_of(folder: str) -> Metadata:
    filesystem, path = open_store(folder)
    objects = read_marker((Path(folder) / MARKER).read_bytes(), uri=folder).objects
    return CheckpointReader(filesystem, path, objects=objects, uri=folder).read_metadata()


def test_tied_weight_is_stored_once(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(3))
    keys = metadata_of(told.last_checkpoint).state_dict_metadata
    assert "model.model.embed_tokens.weight" in keys
    assert not [key for key in keys if "lm_head" in key]


def test_checkpoint_holds_tensors_only(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path), noise(), stop=StopAt(3))
    entries = metadata_of(told.last_checkpoint).state_dict_metadata
    assert {type(entry).__name__ for entry in entries.values()} == {"TensorStorageMetadata"}


# The marker.


def rewrite_marker(folder: Path, **changes: object) -> None:
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(marker | changes))


def test_checkpoint_of_another_experiment_is_refused(tmp_path: Path) -> None:
    _, newer = saved_twice(tmp_path)
    rewrite_marker(newer, fingerprint="0" * 64, run_id="other-000000000000")
    with pytest.raises(CheckpointError, match="belongs to another experiment") as refused:
        alone(tiny(tmp_path), noise())
    assert "other-000000000000" in str(refused.value)


def test_checkpoint_of_another_kind_of_device_is_refused_by_name(tmp_path: Path) -> None:
    _, newer = saved_twice(tmp_path)
    rewrite_marker(newer, device_kind="cuda")
    with pytest.raises(CheckpointError, match=r"found +cuda \(parts rng\.vrank0"):
        alone(tiny(tmp_path), noise())


def test_marker_names_versions_writer_and_every_object(tmp_path: Path) -> None:
    _, newer = saved_twice(tmp_path)
    marker = json.loads((newer / MARKER).read_text())
    assert set(marker["versions"]) >= {"torch", "transformers", "torchdata", "numpy", "kettle"}
    assert marker["versions"]["torch"] == importlib.metadata.version("torch")
    assert (marker["step"], marker["attempt_id"], marker["world_size"]) == (5, "attempt", 1)
    assert set(marker["objects"]) == {p.name for p in newer.iterdir()} - {MARKER}


# Retention.


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    told = alone(tiny(tmp_path, checkpoint__every=2, checkpoint__keep=2), noise())
    committed = [Path(c.checkpoint_uri) for c in told.of(CheckpointCommitted)]
    assert len(committed) == 5
    assert [folder.exists() for folder in committed] == [False, False, False, True, True]


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_after_a_fallback_keeps_what_is_whole(tmp_path: Path, keep: int) -> None:
    options = {"checkpoint__every": 1, "checkpoint__keep": keep}
    first = alone(tiny(tmp_path, checkpoint__every=3, checkpoint__keep=9), noise(), stop=StopAt(8))
    whole, *damaged = (Path(c.checkpoint_uri) for c in first.of(CheckpointCommitted))
    for folder in damaged:  # of steps 6 and 7
        truncated_shard(folder)
    alone(tiny(tmp_path, **options), noise(), name="second", stop=StopAt(6))
    third = alone(tiny(tmp_path, **options), noise(), name="third")
    assert third.resumed_from == 5
    assert not whole.exists()


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "a b"])
def test_root_is_taken_literally(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    _, second = interrupted(tiny(tmp_path / name), noise(), stops=[StopAt(3)])
    assert second.resumed_from == 2


def test_resume_with_other_library_versions_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, newer = saved_twice(tmp_path)
    marker = json.loads((newer / MARKER).read_text())
    rewrite_marker(newer, versions={**marker["versions"], "torch": "2.0.0"})
    resumed = alone(tiny(tmp_path), noise(), name="after")
    assert resumed.resumed_from == 5
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("torch 2.0.0 -> " in message for message in warnings)


def test_unknown_scheme_is_refused_with_the_extra_to_install() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere://x.*kettle\[s3\]"):
        open_store("nowhere://x")


def test_forgetting_nothing_loads_every_key(tmp_path: Path) -> None:
    """The seam used by the controls goes through the same exact comparison of keys."""
    _, second = interrupted(
        tiny(tmp_path), noise(), stops=[StopAt(3)], change=forgetting("model", keys=[])
    )
    assert second.resumed_from == 2
