"""How an attempt is evicted. The driver neither knows nor cares which of these it was given."""

import signal
import subprocess
from collections.abc import Callable

Trigger = Callable[[subprocess.Popen[bytes]], None]
"""Starts the eviction of the attempt whose launcher this is, and returns at once."""


def terminate_launcher(launcher: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the launcher alone, as a kubelet sends it to PID 1 of a container."""
    launcher.send_signal(signal.SIGTERM)
