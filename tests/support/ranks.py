"""Several real ranks over gloo, forked from a server that has torch loaded already."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from kettle.distributed import Ranks, process_group

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["kettle.train.assemble", "kettle.train.loop", "support.attempts", "support.experiments"]
)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(ranks, *args)` on this many ranks; what each returned, in rank order."""
    port = _free_port()
    call = (function, args)
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _CONTEXT.Process(target=_enter, args=(_environment(rank, world_size, port), sender, call))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        answers = [_answer(receiver, sender) for receiver, sender in pipes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    for rank, (_, failure) in enumerate(answers):
        assert failure is None, f"rank {rank} failed:\n{failure}"
    return [value for value, _ in answers]


def _answer(receiver: Connection, sender: Connection) -> tuple[Any, str | None]:
    sender.close()  # so that a rank that dies is an end of file here, and not a wait for ever
    try:
        return pickle.loads(receiver.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return None, "died without a word"


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _enter(
    environment: dict[str, str],
    sender: Connection,
    call: tuple[Callable[..., Any], tuple[Any, ...]],
) -> None:
    os.environ.update(environment)
    function, args = call
    answer: tuple[Any, str | None]
    try:
        with process_group("cpu", timeout_s=60) as ranks:
            answer = (function(ranks, *args), None)
    except BaseException:  # noqa: BLE001 - the test process reports it
        answer = (None, traceback.format_exc())
    # Bytes, since a queue of tensors would share their memory with a process that is gone.
    sender.send_bytes(pickle.dumps(answer))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["Ranks", "on_ranks"]
