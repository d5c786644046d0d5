"""How far the run is: finished steps, tokens, and the position in the data."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class Progress:
    """Finished steps and the tokens they learned from (a `Stateful`)."""

    step: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Two int64 scalars."""
        return {"step": torch.tensor(self.step), "tokens": torch.tensor(self.tokens)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the numbers of a checkpoint."""
        self.step = int(state["step"].item())
        self.tokens = int(state["tokens"].item())


@dataclass
class LoaderPosition:
    """The step boundary in the data (a `Stateful`): epoch and places of it consumed.

    It is set when a step has been applied, never while one is under way, although the loader
    itself has moved on by then.
    """

    epoch: int = 0
    sample_index: int = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Two int64 scalars."""
        return {
            "epoch": torch.tensor(self.epoch),
            "sample_index": torch.tensor(self.sample_index),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the position of a checkpoint."""
        self.epoch = int(state["epoch"].item())
        self.sample_index = int(state["sample_index"].item())
