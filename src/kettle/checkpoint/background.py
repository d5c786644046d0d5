"""A save beside training: from a copy in host memory, one at a time.

Weights and moments change only in the optimizer's step. So the copy is made in a thread while the
next step computes its gradients, and training waits for it just before it applies them.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from kettle.distributed import Ranks, told_by_first
from kettle.errors import CheckpointError, KettleError, SaveError

S = TypeVar("S")


@dataclass(frozen=True)
class _InFlight(Generic[S]):
    """The save that goes on.

    Attributes:
        copied: done when training may change the tensors.
        written: done when every rank has written, or failed on all of them.
        committer: on rank 0, the thread that commits and then leaves its answer.
    """

    step: int
    cancelled: threading.Event
    copied: Future[object]
    written: Future[object]
    committer: threading.Thread | None
    answer: list[S | KettleError] = field(default_factory=list)


class BackgroundSave(Generic[S]):
    """At most one save that goes on beside training."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._copies = HostCopies()
        self._group: dist.ProcessGroup | None = None
        self._in_flight: _InFlight[S] | None = None
        self._news: S | SaveError | None = None
        self._blocked_s = 0.0

    @property
    def step(self) -> int | None:
        """Which step is in flight, or has landed and was not asked for yet."""
        return None if self._in_flight is None else self._in_flight.step

    def start(
        self,
        step: int,
        tensors: Mapping[str, Any],
        *,
        writer: StorageWriter,
        cancelled: threading.Event,
        finish: Callable[[Future[object], Callable[[], float]], S],
    ) -> None:
        """Begin a save, all of which happens in threads; collective.

        Args:
            tensors: of all parts, by part and key. They must not change until
                `wait_until_copied` has returned.
            cancelled: makes the writer give up.
            finish: called on rank 0 in a thread, with the future of the write and a function that
                says for how many milliseconds training stood still; commits.
        """
        assert self._in_flight is None
        started = time.monotonic()
        if self._group is None:
            # Its collectives would interleave with the stop decision's on the control group.
            self._group = dist.new_group(backend="gloo")
        response = dcp.async_save(
            dict(tensors),
            storage_writer=writer,
            process_group=self._group,
            async_stager=self._copies,
        )
        assert isinstance(response, AsyncSaveResponse)
        copied = cast("Future[object]", response.staging_completion)
        written = cast("Future[object]", response.upload_completion)
        self._blocked_s = time.monotonic() - started
        answer: list[S | KettleError] = []

        def commit() -> None:
            try:
                answer.append(finish(written, lambda: self._blocked_s * 1e3))
            except KettleError as error:
                answer.append(error)
            except Exception as error:  # noqa: BLE001 - a thread has no other way to say it
                answer.append(CheckpointError(f"step {step}: {type(error).__name__}: {error}"))
            if isinstance(answer[0], SaveError) or not isinstance(answer[0], KettleError):
                self._news = answer[0]

        committer = None
        if self._ranks.is_first:
            committer = threading.Thread(target=commit, name=f"commit-{step}", daemon=True)
            committer.start()
        self._in_flight = _InFlight(step, cancelled, copied, written, committer, answer)

    def wait_until_copied(self) -> None:
        """Return when the tensors of the save in flight may change; most often at once."""
        if self._in_flight is None or self._in_flight.copied.done():
            return
        started = time.monotonic()
        self._in_flight.copied.exception()  # of no concern here: the save fails with it
        self._blocked_s += time.monotonic() - started

    def cancel(self) -> None:
        """Ask the save to give up; `finish` still has to be called."""
        assert self._in_flight is not None
        self._in_flight.cancelled.set()

    def take_news(self) -> S | SaveError | None:
        """How the last save ended, once, as soon as that is known; rank 0 alone gets it."""
        news, self._news = self._news, None
        return news

    def finish(self) -> S | SaveError:
        """Wait for the save, and say on all ranks how it ended; collective.

        Raises:
            KettleError: what ended it, but for a SaveError.
        """
        in_flight = self._in_flight
        assert in_flight is not None
        if in_flight.committer is not None:
            in_flight.committer.join()
        else:
            in_flight.written.exception()  # rank 0 has the same one, and says it
        self._in_flight = None

        def answer() -> S:
            if isinstance(in_flight.answer[0], KettleError):
                raise in_flight.answer[0]
            return in_flight.answer[0]

        try:
            return told_by_first(answer, ranks=self._ranks)
        except SaveError as error:
            return error


@contextmanager
def _after(ready: torch.cuda.Event | None) -> Iterator[None]:
    """A CUDA stream of its own that begins with an event and has ended on leaving."""
    if ready is None:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class HostCopies(AsyncStager):
    """Copies tensors in a thread, into memory that is kept from save to save.

    Fresh memory costs more than the copy into it: the kernel clears every page of it first.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")

    def stage(self, state_dict: dict[str, Mapping[str, torch.Tensor]]) -> Future[dict[str, Any]]:
        """Begin to copy the tensors of all parts, which have to stay as they are until then."""
        ready = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        return self._thread.submit(self._copy, state_dict, ready)

    def synchronize_staging(self) -> None:
        """Nothing to wait for here: whoever changes the tensors waits for the future."""
        return

    def close(self) -> None:
        """Let thread and memory go."""
        self._thread.shutdown()
        self._copies.clear()

    def _copy(
        self, state: Mapping[str, Mapping[str, torch.Tensor]], ready: torch.cuda.Event | None
    ) -> dict[str, Any]:
        with torch.no_grad(), _after(ready):
            return {
                part: {key: self._copied(part, key, tensor) for key, tensor in tensors.items()}
                for part, tensors in state.items()
            }

    def _copied(self, part: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._copies.get((part, key))
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            copy = torch.empty(
                local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda"
            )
            self._copies[part, key] = copy
        copy.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return copy
        return DTensor.from_local(
            copy,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
