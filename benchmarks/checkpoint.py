"""Measure saving and loading as ratios to plain file operations on the same disk, in one run.

python benchmarks/checkpoint.py [--size GIB] [--repetitions N] [--folder PATH] [--only SECTION]

A speed of 1.2 means that kettle takes 1 / 1.2 of the time of writing (or reading) the same bytes
with nothing but `write` and `fsync` (or `read`).
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from background import ALONE, BESIDE, WAITED, Blocking, blocked_arms
from kettle.checkpoint.digest import DigestStream, Expected
from kettle.checkpoint.durable import DurableLocalFileSystem
from kettle.checkpoint.reader import CheckpointReader
from kettle.checkpoint.verified import Verify
from kettle.checkpoint.windows import memory_of
from kettle.checkpoint.writer import CheckpointWriter
from kettle.identity import library_versions
from measure import Samples, Spread, interleave, progress, spread
from ranks import on_ranks

RESULTS = Path(__file__).parent / "results"

SAVE_TARGETS = {1: 1.2, 2: 1.0}
COLD_LOAD_TARGETS = {1: 0.80, 2: 0.80}
WARM_LOAD_TARGETS: dict[int, float | None] = {1: 0.65, 2: None}
VERIFICATION_TARGET = 0.10
BLOCKED_TARGET = 0.10
MEMORY_TARGET = 0.25

LARGE, SMALL = 48, 96
GULP = 8 << 20

RAW, KETTLE, STOCK = "raw", "kettle", "stock DCP"
UNVERIFIED = "kettle, sizes only"


@dataclass(frozen=True)
class Plan:
    """How much is measured, and where.

    Attributes:
        size_bytes: of the state, over all ranks.
    """

    size_bytes: int
    repetitions: int
    folder: str


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        figure: median and quartiles over the repetitions.
        worst: the one furthest on the wrong side.
        bound: on which side of the target the median should be.
        ms: what it was made from.
    """

    section: str
    world_size: int
    what: str
    figure: Spread
    worst: float
    bound: Literal["at least", "at most"]
    target: float | None
    repetitions: int
    ms: Mapping[str, Spread]

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.target is None:
            return ""
        below = self.figure.median < self.target
        return "no" if below == (self.bound == "at least") else "yes"


def main() -> int:
    """Measure, print the table on stdout and write both files."""
    parser = argparse.ArgumentParser(description="Measure kettle's checkpoints as ratios of a run.")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="measure this; may be repeated"
    )
    parser.add_argument("--size", type=float, default=1.0, metavar="GIB", help="default: 1")
    parser.add_argument("--repetitions", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on the disk to be measured; default: temp"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    said = parser.parse_args()
    started = datetime.now(UTC)
    loads = {"start": os.getloadavg()}
    rows: list[Row] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="kettle-bench-", dir=said.folder) as folder:
        plan = Plan(int(said.size * (1 << 30)), said.repetitions, folder)
        for name in said.only or SECTIONS:
            for row in SECTIONS[name](plan):
                rows.append(row)
                progress("")
                print(_line(row), flush=True)
            loads[f"after {name}"] = os.getloadavg()
    document = {
        "date": started.isoformat(timespec="seconds"),
        "wall_s": round((datetime.now(UTC) - started).total_seconds()),
        "size_bytes": plan.size_bytes,
        "machine": {"cores": os.cpu_count(), "system": sys.platform},
        "load_1_5_15_min": loads,
        "versions": library_versions(),
        "rows": [asdict(row) | {"met": row.verdict} for row in rows],
    }
    said.out.mkdir(parents=True, exist_ok=True)
    place = said.out / f"{started:%Y-%m-%dT%H%M}-checkpoint"
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.5g}"))
    place.with_suffix(".json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(_page(document, rows), encoding="utf-8")
    print(f"wrote {place}.json and .md", file=sys.stderr)
    return 0


# Sections.


def measure_saves(plan: Plan) -> Iterator[Row]:
    """Synchronous saves with digests and every fsync."""
    for world_size in (1, 2):
        samples, shares, peak = on_ranks(save_arms, plan, world_size=world_size)[0]
        yield _speed("save", samples, KETTLE, world_size, SAVE_TARGETS[world_size])
        yield _speed("save", samples, STOCK, world_size, None)
        yield from _shares("save", shares, world_size)
        yield _memory("save", peak, world_size)


def measure_loads(plan: Plan) -> Iterator[Row]:
    """Verified loads, from the disk and from the page cache."""
    for world_size in (1, 2):
        cold, warm, shares, peak = on_ranks(load_arms, plan, world_size=world_size)[0]
        yield _speed("cold load", cold, KETTLE, world_size, COLD_LOAD_TARGETS[world_size])
        yield _speed("warm load", warm, KETTLE, world_size, WARM_LOAD_TARGETS[world_size])
        yield _speed("warm load", warm, STOCK, world_size, None)
        yield _verification("cold load", cold, world_size)
        yield _verification("warm load", warm, world_size)
        yield from _shares("warm load", shares, world_size)
        yield _memory("load", peak, world_size)


def measure_blocking(plan: Plan) -> Iterator[Row]:
    """How long training stands still for a background save."""
    for world_size in (1, 2):
        blocking = on_ranks(background_arms, plan, world_size=world_size)[0]
        times = {arm: [s.wall_s for s in blocking.samples[arm]] for arm in blocking.samples}
        ms = {arm: spread([1e3 * second for second in times[arm]]) for arm in times}
        slowed = [b - a for b, a in zip(times[BESIDE], times[ALONE], strict=True)]
        for what, seconds, target in (
            ("training stands still", blocking.stood_still_s, BLOCKED_TARGET),
            ("the step beside it takes longer", slowed, None),
        ):
            shares = [s / w for s, w in zip(seconds, times[WAITED], strict=True)]
            yield Row(
                section="background",
                world_size=world_size,
                what=f"{what} / {WAITED}",
                figure=spread(shares),
                worst=max(shares),
                bound="at most",
                target=target,
                repetitions=len(shares),
                ms=ms,
            )


SECTIONS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "save": measure_saves,
    "load": measure_loads,
    "background": measure_blocking,
}


# What the ranks do.

State = dict[str, DTensor]


def save_arms(plan: Plan) -> tuple[Samples, dict[str, list[float]], float]:
    """Times of raw, kettle's and the stock save; shares of kettle's; its peak memory."""
    with _group() as rank:
        state = _state(plan.size_bytes)
        memories = _memories(state)
        places = {name: f"{plan.folder}/{name}-{dist.get_world_size()}" for name in (RAW, KETTLE)}
        stock = f"{plan.folder}/stock-{dist.get_world_size()}"

        def clear() -> None:
            dist.barrier()
            if rank == 0:
                for folder in (*places.values(), stock):
                    shutil.rmtree(folder, ignore_errors=True)
                Path(places[RAW]).mkdir()
                # What is deleted or dirty is not the next arm's business.
                os.sync()

        def save() -> None:
            dcp.save(
                dict(state),
                storage_writer=CheckpointWriter(DurableLocalFileSystem(), places[KETTLE]),
            )

        clear()
        dist.barrier()
        peak = _peak_above(save) / sum(map(len, memories))
        samples = interleave(
            {
                RAW: lambda: _raw_save(f"{places[RAW]}/{rank}", memories),
                KETTLE: save,
                STOCK: lambda: dcp.save(
                    dict(state), storage_writer=dcp.FileSystemWriter(stock, thread_count=1)
                ),
            },
            repetitions=plan.repetitions,
            warmup=2,
            meet=_alternately(clear),
            title=_title("save"),
        )
        shares = _repeated(plan, lambda: _save_shares(state, places[KETTLE], clear))
        return samples, shares, _largest(peak)


def load_arms(plan: Plan) -> tuple[Samples, Samples, dict[str, list[float]], float]:
    """Times of raw and kettle's load, cold and warm; shares of the warm one; its peak memory."""
    with _group() as rank:
        state = _state(plan.size_bytes)
        folder = f"{plan.folder}/loaded-{dist.get_world_size()}"
        stock = f"{plan.folder}/stock-loaded-{dist.get_world_size()}"
        writer = CheckpointWriter(DurableLocalFileSystem(), folder)
        dcp.save(dict(state), storage_writer=writer)
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(stock, thread_count=1))
        told = [{name: Expected(o.size_bytes, o.digest) for name, o in writer.objects.items()}]
        dist.broadcast_object_list(told, src=0)
        memories = _memories(state)
        data = f"{folder}/__{rank}_0.distcp"

        def load(verify: Verify = "digests") -> None:
            reader = CheckpointReader(
                DurableLocalFileSystem(), folder, objects=told[0], uri=folder, verify=verify
            )
            dcp.load(dict(state), storage_reader=reader)

        peak = _peak_above(load) / sum(map(len, memories))
        arms: dict[str, Callable[[], object]] = {
            RAW: lambda: _raw_load(data, memories),
            KETTLE: load,
        }
        cold = interleave(
            arms | {UNVERIFIED: lambda: load("sizes")},
            repetitions=plan.repetitions,
            warmup=1,
            meet=_alternately(lambda: _drop_cache(data)),
            title=_title("cold load"),
        )
        warm = interleave(
            arms
            | {
                UNVERIFIED: lambda: load("sizes"),
                STOCK: lambda: dcp.load(dict(state), storage_reader=dcp.FileSystemReader(stock)),
            },
            repetitions=plan.repetitions,
            warmup=2,
            meet=dist.barrier,
            title=_title("warm load"),
        )
        shares = _repeated(plan, lambda: _load_shares(load, data, memories))
        return cold, warm, shares, _largest(peak)


def background_arms(plan: Plan) -> Blocking:
    """Times of a save that is waited for, and of a step beside one that is not."""
    with _group():
        return blocked_arms(
            _state(plan.size_bytes),
            f"{plan.folder}/blocked-{dist.get_world_size()}",
            repetitions=plan.repetitions,
            title=_title("background"),
        )


class _group:  # noqa: N801 - a context manager
    """The process group of an elastic worker, one thread a rank as in training."""

    def __enter__(self) -> int:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return dist.get_rank()

    def __exit__(self, *_error: object) -> None:
        dist.destroy_process_group()


def _state(size_bytes: int) -> State:
    """Weights and moments as FSDP shards them: few large tensors and many small ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = size_bytes // LARGE // 4096 // mesh.size()
    shapes = [(rows, 1024)] * LARGE + [(1024 // mesh.size(),)] * SMALL
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        f"tensor.{number}": DTensor.from_local(
            torch.empty(shape).random_(generator=generator), mesh, [Shard(0)]
        )
        for number, shape in enumerate(shapes)
    }


def _memories(state: State) -> list[memoryview]:
    return [memory_of(tensor.to_local()) for tensor in state.values()]


def _raw_save(path: str, memories: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for memory in memories:
        rest = memory
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)


def _raw_load(path: str, memories: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for memory in memories:
        rest = memory
        while rest:
            rest = rest[os.readv(descriptor, [rest[:GULP]]) :]
    os.close(descriptor)


def _drop_cache(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _digest(memories: Sequence[memoryview]) -> None:
    stream = DigestStream()
    for memory in memories:
        stream.update(memory)
    stream.finish()


class _Timed(DurableLocalFileSystem):
    """Adds up how long writes, and closes with their fsync, take."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.spent = {"write": 0.0, "fsync": 0.0}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file: Any = super()._open(path, mode, **options)
        file.write = self._timed("write", file.write)
        file.close = self._timed("fsync", file.close)
        return file

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.spent[name] += time.perf_counter() - started

        return timed


def _save_shares(state: State, folder: str, clear: Callable[[], None]) -> dict[str, float]:
    clear()
    dist.barrier()
    filesystem = _Timed()
    whole = _seconds(
        lambda: dcp.save(dict(state), storage_writer=CheckpointWriter(filesystem, folder))
    )
    digest = _seconds(lambda: _digest(_memories(state)))
    parts = filesystem.spent | {"digest (alone)": digest}
    parts["rest: plan, metadata, other ranks"] = max(0.0, whole - sum(parts.values()))
    return {name: seconds / whole for name, seconds in parts.items()}


def _load_shares(
    load: Callable[[], None], data: str, memories: Sequence[memoryview]
) -> dict[str, float]:
    dist.barrier()
    whole = _seconds(load)
    parts = {
        "read (alone)": _seconds(lambda: _raw_load(data, memories)),
        "digest (alone)": _seconds(lambda: _digest(memories)),
    }
    return {name: seconds / whole for name, seconds in parts.items()}


def _repeated(plan: Plan, shares: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
    rounds = [shares() for _ in range(max(1, plan.repetitions // 3))]
    return {name: [one[name] for one in rounds] for name in rounds[0]}


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _peak_above(function: Callable[[], object]) -> float:
    """Bytes of memory that a call needs at its peak beyond what the process had before."""
    # Linux sets the peak back to what the process has now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _memory_bytes("VmRSS")
    function()
    return max(0.0, _memory_bytes("VmHWM") - before)


def _memory_bytes(field: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


def _largest(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def _alternately(prepare: Callable[[], None]) -> Callable[[], None]:
    """Meet, with preparations every other time: before an arm, which is not timed."""
    before_an_arm = itertools.cycle((True, False))

    def meet() -> None:
        if next(before_an_arm):
            prepare()
        dist.barrier()

    return meet


def _title(what: str) -> str | None:
    return f"{what}, {dist.get_world_size()} ranks" if dist.get_rank() == 0 else None


# Rows.


def _speed(section: str, samples: Samples, name: str, world_size: int, target: float | None) -> Row:
    # Ranks meet before and after an arm, so any rank's clock will do.
    times = {arm: [sample.wall_s for sample in samples[arm]] for arm in (RAW, name)}
    speeds = [raw / own for raw, own in zip(times[RAW], times[name], strict=True)]
    return Row(
        section=section,
        world_size=world_size,
        what=f"speed of {name} / {RAW}",
        figure=spread(speeds),
        worst=min(speeds),
        bound="at least",
        target=target,
        repetitions=len(speeds),
        ms={arm: spread([1e3 * second for second in times[arm]]) for arm in times},
    )


def _verification(section: str, samples: Samples, world_size: int) -> Row:
    """How much of a load's time the comparison with digests takes."""
    times = {arm: [sample.wall_s for sample in samples[arm]] for arm in (KETTLE, UNVERIFIED)}
    costs = [1 - bare / own for own, bare in zip(times[KETTLE], times[UNVERIFIED], strict=True)]
    return Row(
        section=section,
        world_size=world_size,
        what="verification, share of the time",
        figure=spread(costs),
        worst=max(costs),
        bound="at most",
        target=VERIFICATION_TARGET,
        repetitions=len(costs),
        ms={arm: spread([1e3 * second for second in times[arm]]) for arm in times},
    )


def _shares(section: str, shares: Mapping[str, list[float]], world_size: int) -> Iterator[Row]:
    for name, values in shares.items():
        yield Row(
            section=section,
            world_size=world_size,
            what=f"{name}, share of the time",
            figure=spread(values),
            worst=max(values),
            bound="at most",
            target=None,
            repetitions=len(values),
            ms={},
        )


def _memory(section: str, peak: float, world_size: int) -> Row:
    return Row(
        section=section,
        world_size=world_size,
        what="peak memory above the state / state",
        figure=spread([peak]),
        worst=peak,
        bound="at most",
        target=MEMORY_TARGET,
        repetitions=1,
        ms={},
    )


HEADER = (
    "| section | ranks | what | median (quartiles) | worst | ms | target | met |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _line(row: Row) -> str:
    figure = f"{row.figure.median:.3f}"
    if row.repetitions > 1:
        figure += f" ({row.figure.low:.3f} to {row.figure.high:.3f})"
    times = ", ".join(f"{name} {times.median:.0f}" for name, times in row.ms.items())
    target = "" if row.target is None else f"{row.bound} {row.target}"
    return (
        f"| {row.section} | {row.world_size} | {row.what} | {figure} | {row.worst:.3f} "
        f"| {times} | {target} | {row.verdict} |"
    )


def _page(document: Mapping[str, object], rows: Sequence[Row]) -> str:
    facts = ("date", "wall_s", "size_bytes", "machine", "load_1_5_15_min", "versions")
    said = "\n".join(f"- {fact}: {json.dumps(document[fact])}" for fact in facts)
    return f"# Checkpoints, measured in one run\n\n{said}\n\n{HEADER}\n" + "".join(
        _line(row) + "\n" for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
