"""Which run this is: fingerprint, run id and checkpoint prefix."""

import hashlib
import importlib.metadata
import json
import platform

from kettle.config import ExperimentConfig

NUMERICS_VERSION = 1
"""Rises whenever kettle itself computes other bits from the same experiment (see CHANGELOG.md)."""

RANDOM_WEIGHTS = "random"
"""The model revision of a model that starts from random weights."""

_LIBRARIES = ("torch", "transformers", "torchdata", "numpy", "kettle")


def fingerprint(
    experiment: ExperimentConfig, *, data_digest: str, model_revision: str = RANDOM_WEIGHTS
) -> str:
    """SHA-256 (64 hex digits) over everything that changes what is computed."""
    identity = {
        "experiment": experiment.model_dump(mode="json"),
        "data_digest": data_digest,
        "model_revision": model_revision,
        "numerics_version": NUMERICS_VERSION,
    }
    canonical = json.dumps(
        identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def run_id(name: str, fingerprint: str) -> str:
    """`<name>-<12 hex>`: what the run is called everywhere."""
    return f"{name}-{fingerprint[:12]}"


def checkpoint_prefix(root: str, run_id: str) -> str:
    """The folder or URI under which all checkpoints of the run lie."""
    return f"{root.rstrip('/')}/{run_id}"


def library_versions() -> dict[str, str]:
    """Versions of what computes, read from package metadata without importing any of it."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return versions | {"python": platform.python_version()}
