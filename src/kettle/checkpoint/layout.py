"""Names in a checkpoint store: pure.

<root>/<run id>/
    _log/00000007.json                          who may write, and what was committed
    step-00000020-g0002-<attempt id>/
        __0_0.distcp                            one for each rank that saved
        metadata.json                           where each tensor lies, digests of all blocks
        _COMMIT                                 written last: its presence is completeness
"""

import re
from dataclasses import dataclass

MARKER = "_COMMIT"
METADATA = "metadata.json"
LOG = "_log"
PARTIAL = ".partial"

_NAME = re.compile(r"step-(\d{8,})-g(\d{4,})-([a-z0-9-]+)")
_ENTRY = re.compile(r"(\d{8,})\.json")
_OBJECT = re.compile(r"__\d+_\d+\.distcp|metadata\.json|_COMMIT|\..*\.partial")
_UNSAFE = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, order=True)
class Place:
    """What a checkpoint's folder name says, in the order of checkpoints: step, generation."""

    step: int
    generation: int
    name: str


def checkpoint_name(step: int, *, generation: int, attempt_id: str) -> str:
    """A folder name that sorts by step and that no two attempts share.

    So what a killed attempt left behind can never become part of a later checkpoint.
    """
    attempt = _UNSAFE.sub("-", attempt_id.lower()).strip("-") or "attempt"
    return f"step-{step:08d}-g{generation:04d}-{attempt}"


def place_of(name: str) -> Place | None:
    """Step and generation of a checkpoint's folder, or None for any other name."""
    match = _NAME.fullmatch(name)
    return Place(step=int(match[1]), generation=int(match[2]), name=name) if match else None


def is_own_object(name: str) -> bool:
    """Whether a checkpoint's folder holds this because kettle wrote it."""
    return _OBJECT.fullmatch(name) is not None


def entry_name(number: int) -> str:
    """The object of a log entry."""
    return f"{number:08d}.json"


def entry_number(name: str) -> int | None:
    """The number of a log entry's object, or None for any other name."""
    match = _ENTRY.fullmatch(name)
    return int(match[1]) if match else None


def join(prefix: str, *names: str) -> str:
    """A path or URI below a prefix."""
    return "/".join([prefix.rstrip("/"), *names])
