"""The only place that builds the parts of an attempt."""

from collections.abc import Callable
from typing import Literal

from kettle.checkpoint.facts import Identity
from kettle.checkpoint.filesystem import absolute
from kettle.checkpoint.retention import Policy, every, latest
from kettle.checkpoint.schedule import SaveSchedule
from kettle.checkpoint.store import CheckpointStore
from kettle.config import CheckpointConfig, RunConfig
from kettle.data.loader import Dataset, MicroBatches
from kettle.data.order import order_of
from kettle.determinism import enforce
from kettle.distributed import Ranks
from kettle.hosting import plan_hosting
from kettle.identity import checkpoint_prefix, fingerprint, run_id
from kettle.model.build import assert_tied, build_model
from kettle.model.optim import build_optimizer, build_scheduler
from kettle.model.shard import shard, sharded_modules
from kettle.records import Record
from kettle.reduction.exchange import CanonicalReduction, NativeReduction, Reduction
from kettle.reduction.norm import CanonicalNorm
from kettle.state.parts import ModelPart, OptimizerPart, Part, SchedulerPart, streams_key
from kettle.state.progress import LoaderPosition, Progress
from kettle.state.rng import StreamsPart, VirtualRankStreams, seeded
from kettle.train.run import Run
from kettle.train.stop import StopSource


def assemble(
    config: RunConfig,
    dataset: Dataset,
    *,
    ranks: Ranks,
    attempt_id: str,
    stop: StopSource,
    emit: Callable[[Record], None],
    grace_s: float,
    begin: Literal["newest", "scratch"] = "newest",
) -> Run:
    """Build dataset order, model, sharding, reduction, optimizer, schedule and parts; collective.

    Everything stands at step 0; restoring is the loop's first act.

    Raises:
        UsageError: this number of ranks can't host the experiment.
        DataError: the data is smaller than one step.
    """
    experiment = config.experiment
    enforce(threads=experiment.threads)
    identity = fingerprint(experiment, data_digest=dataset.digest)
    hosting = plan_hosting(
        virtual_ranks=experiment.virtual_ranks,
        world_size=ranks.world_size,
        exchange=config.runtime.exchange,
    )
    order = order_of(experiment, samples=len(dataset.samples))

    model = build_model(experiment.model, seed=experiment.seed).to(ranks.device)
    shard(model, mesh=ranks.mesh, compute_dtype=experiment.compute_dtype)
    assert_tied(model, expected=experiment.model.tie_embeddings)
    modules = sharded_modules(model)
    reduction: Reduction
    if experiment.reduction == "canonical":
        reduction = CanonicalReduction(modules, hosting=hosting)
    else:
        reduction = NativeReduction(modules, hosting=hosting)
    optimizer = build_optimizer(model, experiment.optim)
    scheduler = build_scheduler(optimizer, experiment.optim, total_steps=experiment.total_steps)

    hosted = hosting.hosted_by(ranks.rank)
    streams = VirtualRankStreams(
        {v: seeded(experiment.seed, virtual_rank=v, device=ranks.device) for v in hosted},
        device=ranks.device,
    )
    progress, position = Progress(), LoaderPosition()
    parts: dict[str, Part] = {
        "model": ModelPart(model),
        "optimizer": OptimizerPart(model, optimizer),
        "scheduler": SchedulerPart(scheduler),
        "loader": position,
        "progress": progress,
        **{streams_key(v): StreamsPart(streams, virtual_rank=v) for v in hosted},
    }
    name = run_id(config.name, identity)
    return Run(
        config=config,
        run_id=name,
        attempt_id=attempt_id,
        fingerprint=identity,
        ranks=ranks,
        hosting=hosting,
        order=order,
        dataset=dataset,
        batches=MicroBatches(
            dataset,
            order=order,
            rank=ranks.rank,
            hosting=hosting,
            processes=config.runtime.loader_workers,
        ),
        model=model,
        reduction=reduction,
        norm=CanonicalNorm([p.shape for p in model.parameters()], ranks=ranks),
        optimizer=optimizer,
        scheduler=scheduler,
        streams=streams,
        progress=progress,
        position=position,
        parts=parts,
        store=CheckpointStore(
            checkpoint_prefix(absolute(config.checkpoint.root), name),
            identity=Identity(
                run_id=name,
                fingerprint=identity,
                attempt_id=attempt_id,
                experiment=experiment.model_dump(mode="json"),
            ),
            ranks=ranks,
            policies=retention(config.checkpoint),
            debris_age_s=config.checkpoint.debris_hours * 3600,
            verify=config.checkpoint.verify,
        ),
        schedule=SaveSchedule(every=config.checkpoint.every, total_steps=experiment.total_steps),
        stop=stop,
        emit=emit,
        grace_s=grace_s,
        begin=begin,
    )


def retention(config: CheckpointConfig) -> tuple[Policy, ...]:
    """What a run file says about which checkpoints stay."""
    if config.keep_every is None:
        return (latest(config.keep),)
    return latest(config.keep), every(config.keep_every)
