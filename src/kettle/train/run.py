"""What one attempt works with: built in `assemble`, used in `loop` and `step`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.optim.lr_scheduler import LambdaLR
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from kettle.checkpoint.schedule import SaveSchedule
from kettle.checkpoint.store import CheckpointStore
from kettle.config import RunConfig
from kettle.data.loader import Dataset, MicroBatches
from kettle.data.order import Order
from kettle.distributed import Ranks
from kettle.hosting import Hosting
from kettle.model.optim import AdamW
from kettle.records import Record
from kettle.reduction.exchange import Reduction
from kettle.reduction.norm import CanonicalNorm
from kettle.state.parts import Parts
from kettle.state.progress import LoaderPosition, Progress
from kettle.state.rng import VirtualRankStreams
from kettle.train.stop import StopSource


@dataclass(frozen=True)
class Run:
    """One attempt of a run on one rank.

    Attributes:
        run_id: and `attempt_id`, `fingerprint`: who is speaking in the records.
        parts: everything that a checkpoint holds, by name.
        stop: asked before every micro-batch.
        emit: takes records; only rank 0's go anywhere.
        grace_s: seconds between SIGTERM and SIGKILL.
        begin: where from; "scratch" leaves all committed checkpoints behind.
    """

    config: RunConfig
    run_id: str
    attempt_id: str
    fingerprint: str
    ranks: Ranks
    hosting: Hosting
    order: Order
    dataset: Dataset
    batches: MicroBatches
    model: Qwen2ForCausalLM
    reduction: Reduction
    norm: CanonicalNorm
    optimizer: AdamW
    scheduler: LambdaLR
    streams: VirtualRankStreams
    progress: Progress
    position: LoaderPosition
    parts: Parts
    store: CheckpointStore
    schedule: SaveSchedule
    stop: StopSource
    emit: Callable[[Record], None]
    grace_s: float
    begin: Literal["newest", "scratch"]
