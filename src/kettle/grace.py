"""The grace budget: how much of the time that the platform allows is spent, how much is left."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class GraceBudget:
    """The grace period of one eviction.

    Attributes:
        total_s: seconds between SIGTERM and SIGKILL, as the platform promised.
        started_s: when the stop request came, on the system's monotonic clock, which all processes
            of one machine share.
    """

    total_s: float
    started_s: float

    def spent_s(self) -> float:
        """Seconds since the stop request."""
        return time.monotonic() - self.started_s

    def left_s(self) -> float:
        """Seconds until the platform kills; negative when it is already overdue."""
        return self.total_s - self.spent_s()
