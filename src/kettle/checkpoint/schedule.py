"""Which steps are saved."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SaveSchedule:
    """Every so many steps, and always the last one."""

    every: int | None
    total_steps: int

    def due(self, step: int) -> Literal["schedule", "final"] | None:
        """Why this step is saved, or None."""
        if step == self.total_steps:
            return "final"
        if self.every is not None and step % self.every == 0:
            return "schedule"
        return None
