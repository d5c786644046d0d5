"""Deterministic kernels and the seeds that everything random starts from."""

import hashlib
import os

import torch

_CUBLAS_WORKSPACE = ":4096:8"


def enforce(*, threads: int) -> None:
    """Ask torch for deterministic algorithms and a fixed number of intra-op threads.

    `use_deterministic_algorithms` raises for operations that carry the alert; others may still
    differ, so this is a strong signal and no proof. The proof is the comparison of two runs.
    """
    # cuBLAS reads the variable when its first handle is made, so it must be set before any kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(mode=True)
    # Filling every fresh tensor with NaN finds reads of uninitialised memory, at a cost in each
    # step. None of kettle's results depend on fresh memory: the tests compare bits.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(threads)


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, unrelated to the seeds of all other purposes."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
