"""Tiny experiments with odd sizes, and data whose transforms draw random numbers."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kettle.config import RunConfig, parse
from kettle.data.loader import Dataset, MicroBatch

VOCABULARY = 257
LENGTH = 11


def tiny(root: Path | str, **overrides: Any) -> RunConfig:
    """A run of 9 steps over 3 epochs: 29 samples make 7 micro-batches for each of 2 virtual ranks,
    which accumulation 2 does not divide. Overrides are given as section__key=value."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "experiment": {
            "seed": 5,
            "total_steps": 9,
            "virtual_ranks": 2,
            "micro_batch": 2,
            "accumulation": 2,
            "model": {
                "vocab_size": VOCABULARY,
                "hidden_size": 56,
                "intermediate_size": 87,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "tie_embeddings": True,
                "attention_dropout": 0.2,
            },
            "data": {"source": "stdlib", "sequence_length": LENGTH},
            "optim": {
                "lr": 1e-2,
                "schedule": "cosine",
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "max_grad_norm": 0.5,
            },
        },
        "checkpoint": {"root": str(root)},
        "runtime": {"device": "cpu"},
    }
    for path, value in overrides.items():
        *sections, key = path.split("__")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    return parse(tree, origin="test")


@dataclass(frozen=True)
class NoiseRows:
    """Samples of fixed pseudo-random tokens; reading them draws nothing."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        tokens = np.random.Generator(np.random.PCG64(index)).integers(
            0, VOCABULARY, LENGTH + 1, dtype=np.int64
        )
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def noise(
    count: int = 29, *, transform: Callable[[MicroBatch], MicroBatch] | None = None
) -> Dataset:
    samples = NoiseRows(count)
    if transform is None:
        return Dataset(samples=samples, digest="noise")
    return Dataset(samples=samples, digest="noise", transform=transform)


def _replace_a_token(batch: MicroBatch, *, place: int, token: int) -> MicroBatch:
    input_ids = batch["input_ids"].clone()
    input_ids[:, place] = token
    return {**batch, "input_ids": input_ids}


def draw_from_python(batch: MicroBatch) -> MicroBatch:
    return _replace_a_token(
        batch, place=random.randrange(LENGTH), token=int(random.gauss(100, 20)) % VOCABULARY
    )


def draw_from_numpy(batch: MicroBatch) -> MicroBatch:
    # The global generator is the stream that the tests are about.
    place = np.random.randint(LENGTH)  # noqa: NPY002
    token = int(np.random.normal(100, 20)) % VOCABULARY  # noqa: NPY002
    return _replace_a_token(batch, place=place, token=token)


def draw_from_torch(batch: MicroBatch) -> MicroBatch:
    place = int(torch.randint(LENGTH, ()))
    return _replace_a_token(batch, place=place, token=int(torch.randint(VOCABULARY, ())))


def draw_from_all(batch: MicroBatch) -> MicroBatch:
    return draw_from_torch(draw_from_numpy(draw_from_python(batch)))
