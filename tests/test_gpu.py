"""What only a CUDA device can show. `make test-gpu` runs these; elsewhere they are skipped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kettle.distributed import process_group
from kettle.records import RunCompleted, RunStarted
from kettle.train.stop import StopSource
from support.attempts import (
    Change,
    StopAt,
    Told,
    as_it_is,
    attempt,
    compared,
    forgetting,
    never,
)
from support.experiments import draw_from_all, noise, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(
    root: Path, *, stop: StopSource = never, change: Change = as_it_is, **options: Any
) -> Told:
    config = tiny(root, runtime__device="cuda", **options)
    with process_group("cuda", timeout_s=120) as ranks:
        return attempt(
            config, noise(transform=draw_from_all), ranks=ranks, stop=stop, change=change
        )


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_resumed_run_on_a_gpu_is_bit_identical_to_the_reference(
    tmp_path: Path, compute_dtype: str
) -> None:
    options: dict[str, Any] = {"experiment__compute_dtype": compute_dtype}
    reference = on_gpu(tmp_path / "reference", **options)
    on_gpu(tmp_path / "trial", stop=StopAt(5, 2), **options)
    trial = on_gpu(tmp_path / "trial", **options)
    assert trial.resumed_from == 4
    assert trial.of(RunStarted)[0].device_kind == "cuda"
    assert compared(reference, trial).identical


def test_control_skipping_rng_restore_of_the_cuda_stream_breaks_equivalence(
    tmp_path: Path,
) -> None:
    reference = on_gpu(tmp_path / "reference")
    on_gpu(tmp_path / "trial", stop=StopAt(5))
    forget = forgetting("rng.vrank0", "rng.vrank1", keys=["torch_cuda"])
    trial = on_gpu(tmp_path / "trial", change=forget)
    # Dropout on a GPU draws from the CUDA stream alone.
    assert trial.steps[0].sample_digest == reference.steps[4].sample_digest
    assert trial.steps[0].loss != reference.steps[4].loss


def test_exchange_schedules_give_the_same_bits_on_a_gpu(tmp_path: Path) -> None:
    told = [
        on_gpu(tmp_path / exchange, experiment__virtual_ranks=4, runtime__exchange=exchange)
        for exchange in ("round", "step")
    ]
    digests = [t.of(RunCompleted)[0].weights_digest for t in told]
    assert digests[0] == digests[1]
