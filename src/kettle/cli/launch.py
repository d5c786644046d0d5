"""`kettle launch` and `kettle train`: run one attempt of a run file."""

# ruff: noqa: PLC0415 - torch takes seconds to import, and a stop signal may come before

import logging
import uuid
from pathlib import Path
from typing import Annotated

import typer

from kettle.config import DeploymentFacts, RunConfig, deployment_facts, load

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field by its dotted path; may be repeated."
    ),
]

FromScratch = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="Begin at step 0 and leave all committed checkpoints of the run behind; they stay "
        "until they are pruned.",
    ),
]


def launch(
    run_file: RunFile,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Worker processes, 1 to experiment.virtual_ranks; the result does not depend "
            "on it. Default: KETTLE_WORKERS, or 1.",
        ),
    ] = None,
    overrides: Overrides = None,
    from_scratch: FromScratch = False,
) -> None:
    """Run one attempt with one worker per device: a container's entry.

    Resumes from the newest whole checkpoint. On SIGTERM all workers stop before the next
    micro-batch, save, and exit 75; the next launch goes on where they stopped. Prints JSONL
    records on stdout. Exits 0 only when the run has reached its last step.

    Example: kettle launch examples/stdlib.toml --workers 2 --set checkpoint.root=/tmp/checkpoints
    """
    from kettle.launch import launch as launch_attempt

    config, facts = _read(run_file, overrides)
    raise typer.Exit(
        launch_attempt(
            config,
            workers=facts.workers or 1 if workers is None else workers,
            attempt_id=_attempt_id(facts),
            grace_s=facts.grace_seconds or config.runtime.grace_seconds,
            begin="scratch" if from_scratch else "newest",
        )
    )


def train(
    run_file: RunFile, *, overrides: Overrides = None, from_scratch: FromScratch = False
) -> None:
    """Run one attempt in this process alone: one rank, no launcher.

    Resumes, stops and records like launch, and gives the same bits.

    Example: kettle train examples/stdlib.toml --set experiment.total_steps=20
    """
    from kettle.checkpoint.filesystem import bound_retries
    from kettle.data.identify import identify
    from kettle.hosting import plan_hosting
    from kettle.train.worker import Attempt, talk_to_a_person, work

    config, facts = _read(run_file, overrides)
    plan_hosting(
        virtual_ranks=config.experiment.virtual_ranks,
        world_size=1,
        exchange=config.runtime.exchange,
    )
    talk_to_a_person()
    attempt = Attempt(
        run_id=identify(config).run_id,
        attempt_id=_attempt_id(facts),
        grace_s=facts.grace_seconds or config.runtime.grace_seconds,
        stop_file=None,
        begun_file=None,
        begin="scratch" if from_scratch else "newest",
    )
    bound_retries(attempt.grace_s)
    raise typer.Exit(work(config, attempt))


def _read(run_file: Path, overrides: list[str] | None) -> tuple[RunConfig, DeploymentFacts]:
    logging.basicConfig(format="kettle: %(message)s", level=logging.WARNING)
    from kettle.checkpoint.filesystem import refuse_unusable, use_endpoint

    facts = deployment_facts()
    if facts.s3_endpoint:
        use_endpoint(facts.s3_endpoint)
    config = load(run_file, overrides or [])
    refuse_unusable(config.checkpoint.root)
    return config, facts


def _attempt_id(facts: DeploymentFacts) -> str:
    # A platform may start the same pod twice, and no two attempts may share a name.
    fresh = uuid.uuid4().hex[:12]
    return f"{facts.attempt_id}-{fresh[:6]}" if facts.attempt_id else fresh
