"""Measure kettle's speed in one run, as ratios, and write them under benchmarks/results/.

python benchmarks/run.py [--only step --only startup] [--repetitions N] [--quick]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import steps
from cases import case
from kettle.identity import library_versions
from measure import Samples, Spread, progress, ratios, spread
from ranks import on_ranks
from startup import IMPORT, starts

RESULTS = Path(__file__).parent / "results"

STEP_TARGET = 1.03
REDUCTION_TARGET = 1.05
EXTRAS_TARGET = 0.01
STARTUP_TARGET = 1.3


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        repetitions: of a step of a middle-sized model; others take more or fewer.
    """

    repetitions: int
    startup_repetitions: int
    models: tuple[str, ...]
    reduction_models: tuple[str, ...]
    root: Path

    def repetitions_of(self, model: str) -> int:
        """Small models are quick and noisy, large ones slow and steady."""
        factor = {"example": 2.0, "20M": 0.6}.get(model, 1.0)
        return max(3, round(self.repetitions * factor))


@dataclass(frozen=True)
class Ratio:
    """One line of the table: a numerator over a denominator of the same repetitions.

    Attributes:
        wall: of times on the clock, slowest rank.
        cpu: of CPU times, summed over the ranks; other processes disturb it less.
        target: the wall ratio that it should not exceed; None: only for information.
    """

    section: str
    model: str
    world_size: int
    what: str
    against: str
    wall: Spread
    cpu: Spread
    wall_ms: dict[str, Spread]
    target: float | None
    repetitions: int

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.target is None:
            return ""
        return "yes" if self.wall.median <= self.target else "no"


def main() -> int:
    """Measure, print the table on stdout and write both files."""
    parser = argparse.ArgumentParser(description="Measure kettle's speed as ratios of one run.")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="measure this; may be repeated"
    )
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--quick", action="store_true", help="few repetitions, small models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    said = parser.parse_args()
    started = datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="kettle-bench-") as folder:
        plan = Plan(
            repetitions=said.repetitions,
            startup_repetitions=max(3, said.repetitions // 2),
            models=("example", "2M", "20M"),
            reduction_models=("2M", "20M"),
            root=Path(folder),
        )
        if said.quick:
            plan = replace(
                plan,
                repetitions=4,
                startup_repetitions=2,
                models=("example",),
                reduction_models=("2M",),
            )
        machine = _machine()
        loads = {"start": os.getloadavg()}
        lines: list[Ratio] = []
        for name in said.only or SECTIONS:
            for line in SECTIONS[name](plan):
                lines.append(line)
                progress("")
                print(_row(line), flush=True)
            loads[f"after {name}"] = os.getloadavg()
    document = {
        "date": started.isoformat(timespec="seconds"),
        "wall_s": round((datetime.now(UTC) - started).total_seconds()),
        "machine": machine,
        "load_1_5_15_min": loads,
        "versions": library_versions(),
        "ratios": [asdict(line) | {"met": line.verdict} for line in lines],
    }
    said.out.mkdir(parents=True, exist_ok=True)
    place = said.out / f"{started:%Y-%m-%dT%H%M}{'-quick' if said.quick else ''}"
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.5g}"))
    place.with_suffix(".json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(_page(document, lines), encoding="utf-8")
    print(f"wrote {place}.json and .md", file=sys.stderr)
    return 0


def measure_steps(plan: Plan) -> Iterator[Ratio]:
    """Kettle's step against a bare loop."""
    for model in plan.models:
        for world_size in (1, 2):
            repetitions = plan.repetitions_of(model)
            samples = _on_ranks(
                steps.kettle_and_bare,
                # The largest model has one micro-batch a virtual rank, so that it takes seconds.
                case(model, root=plan.root, accumulation=1 if model == "20M" else 2),
                repetitions=repetitions,
                title=f"step of {model}, {world_size} ranks",
                world_size=world_size,
            )
            for against, target in ((steps.BARE, STEP_TARGET), (steps.BARE_FUSED, None)):
                yield _ratio(
                    samples,
                    [steps.KETTLE],
                    against,
                    section="step",
                    model=model,
                    world_size=world_size,
                    target=target,
                )


def measure_reductions(plan: Plan) -> Iterator[Ratio]:
    """Canonical against native reduction, both with a gradient exchange in each round or step."""
    for model in plan.reduction_models:
        for world_size in (1, 2, 4):
            # With 1 or 4 of 4 virtual ranks both schedules exchange alike.
            exchanges = ("step", "round") if world_size == 2 else ("step",)
            configs = {
                "native": case(model, root=plan.root, accumulation=1, reduction="native")
            } | {
                f"canonical, {exchange}": case(
                    model, root=plan.root, accumulation=1, exchange=exchange
                )
                for exchange in exchanges
            }
            samples = _on_ranks(
                steps.reductions,
                configs,
                repetitions=plan.repetitions_of(model),
                title=f"reduction of {model}, {world_size} ranks",
                world_size=world_size,
            )
            for exchange in exchanges:
                yield _ratio(
                    samples,
                    [f"canonical, {exchange}"],
                    "native",
                    section="reduction",
                    model=model,
                    world_size=world_size,
                    target=REDUCTION_TARGET,
                )


def measure_extras(plan: Plan) -> Iterator[Ratio]:
    """Stop checks and record as a share of the step."""
    for world_size in (1, 2, 4):
        samples = _on_ranks(
            steps.extras,
            case("example", root=plan.root),
            repetitions=plan.repetitions_of("example"),
            title=f"stop checks and record, {world_size} ranks",
            world_size=world_size,
        )
        yield _ratio(
            samples,
            ["stop checks", "record"],
            "step",
            section="extras",
            model="example",
            world_size=world_size,
            target=EXTRAS_TARGET,
        )


def measure_parts(plan: Plan) -> Iterator[Ratio]:
    """Where the time of a step goes, as shares of it."""
    for model in plan.models:
        samples = _on_ranks(
            steps.parts,
            case(model, root=plan.root, accumulation=1 if model == "20M" else 2),
            repetitions=max(3, plan.repetitions_of(model) // 2),
            title=f"parts of a step of {model}",
            world_size=1,
        )
        for name in steps.PARTS:
            yield _ratio(
                samples,
                [name],
                "step",
                section="parts",
                model=model,
                world_size=1,
                target=None,
            )


def measure_startup(plan: Plan) -> Iterator[Ratio]:
    """Process start to first step against importing torch and Qwen2."""
    samples = starts(root=plan.root, repetitions=plan.startup_repetitions)
    for name in samples:
        if name != IMPORT:
            yield _ratio(
                [samples],
                [name],
                IMPORT,
                section="startup",
                model="example",
                world_size=2 if name.endswith("2") else 1,
                target=STARTUP_TARGET,
            )


SECTIONS: dict[str, Callable[[Plan], Iterator[Ratio]]] = {
    "step": measure_steps,
    "reduction": measure_reductions,
    "extras": measure_extras,
    "parts": measure_parts,
    "startup": measure_startup,
}


def _on_ranks(
    function: Callable[..., Samples],
    subject: object,
    *,
    repetitions: int,
    title: str,
    world_size: int,
) -> list[Samples]:
    return on_ranks(function, subject, repetitions, title, world_size=world_size)


def _ratio(
    ranks: Sequence[Samples],
    numerators: Sequence[str],
    denominator: str,
    *,
    section: str,
    model: str,
    world_size: int,
    target: float | None,
) -> Ratio:
    first = ranks[0]
    repetitions = range(len(first[denominator]))

    def wall(name: str) -> list[float]:
        # Ranks meet before and after an arm, so any rank's clock will do.
        return [first[name][i].wall_s for i in repetitions]

    def cpu(name: str) -> list[float]:
        return [sum(rank[name][i].cpu_s for rank in ranks) for i in repetitions]

    return Ratio(
        section=section,
        model=model,
        world_size=world_size,
        what=" + ".join(numerators),
        against=denominator,
        wall=ratios(_added(map(wall, numerators)), wall(denominator)),
        cpu=ratios(_added(map(cpu, numerators)), cpu(denominator)),
        wall_ms={
            name: spread([seconds * 1e3 for seconds in wall(name)])
            for name in (*numerators, denominator)
        },
        target=target,
        repetitions=len(repetitions),
    )


def _added(rows: Iterator[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


HEADER = (
    "| section | model | ranks | ratio | wall: median (quartiles) | CPU time | target | met |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _row(line: Ratio) -> str:
    share = line.against == "step"

    def figure(value: float) -> str:
        return f"{value:.2%}" if share else f"{value:.3f}"

    target = "" if line.target is None else f"<= {line.target:.0%}" if share else str(line.target)
    wall = f"{figure(line.wall.median)} ({figure(line.wall.low)} to {figure(line.wall.high)})"
    return (
        f"| {line.section} | {line.model} | {line.world_size} | {line.what} / {line.against} "
        f"| {wall} | {figure(line.cpu.median)} | {target} | {line.verdict} |"
    )


def _page(document: dict[str, object], lines: Sequence[Ratio]) -> str:
    facts = ("date", "wall_s", "machine", "load_1_5_15_min", "versions")
    said = "\n".join(f"- {fact}: {json.dumps(document[fact])}" for fact in facts)
    rows = "\n".join(map(_row, lines))
    return f"# Speed, measured in one run\n\n{said}\n\n{HEADER}\n{rows}\n"


if __name__ == "__main__":
    sys.exit(main())
