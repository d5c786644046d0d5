"""Run a function in W processes that form a process group over gloo."""

import logging
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

T = TypeVar("T")


def on_ranks(function: Callable[..., T], *args: object, world_size: int) -> list[T]:
    """Call `function` in so many fresh processes at once; what each returns, in rank order."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="bench",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    results = elastic_launch(settings, function)(*args)
    return [results[rank] for rank in range(world_size)]
