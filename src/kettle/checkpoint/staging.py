"""A copy of the state in host memory, from which a background save writes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor


class HostCopies(AsyncStager):
    """Copies tensors into memory that is kept from save to save.

    Fresh memory costs more than the copy into it: the kernel clears every page of it first.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    def stage(self, state_dict: dict[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Copy the tensors of all parts; training may change the originals afterwards."""
        with torch.no_grad():
            staged = {
                part: {key: self._copied(part, key, tensor) for key, tensor in tensors.items()}
                for part, tensors in state_dict.items()
            }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copies are made."""
        return

    def close(self) -> None:
        """Let the memory go."""
        self._copies.clear()

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
