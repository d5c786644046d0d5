"""Names in a checkpoint store: pure.

<root>/<run id>/step-00000020-<attempt id>/
    .metadata          written by torch.distributed.checkpoint
    __0_0.distcp       one or more a rank
    _COMMIT            written last: its presence is completeness
"""

import re

MARKER = "_COMMIT"

_NAME = re.compile(r"step-(\d{8,})-([a-z0-9-]+)")
_UNSAFE = re.compile(r"[^a-z0-9]+")


def checkpoint_name(step: int, *, attempt_id: str) -> str:
    """A folder name that sorts by step and that no two attempts share.

    So what a killed attempt left behind can never become part of a later checkpoint.
    """
    attempt = _UNSAFE.sub("-", attempt_id.lower()).strip("-") or "attempt"
    return f"step-{step:08d}-{attempt}"


def step_of(name: str) -> int | None:
    """The step in a folder name, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def join(prefix: str, *names: str) -> str:
    """A path or URI below a prefix."""
    return "/".join([prefix.rstrip("/"), *names])
