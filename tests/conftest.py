"""Settings that all tests share."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine is slow at times, which is no fault of an example; a hang is pytest-timeout's.
settings.register_profile("kettle", deadline=None, max_examples=50)
settings.load_profile("kettle")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a launcher: tmp_path holds the test's name, and sockets need short paths."""
    return tmp_path_factory.mktemp("run")


def pytest_configure() -> None:
    """A suite that a shell runs in the background inherits an ignored Ctrl-C, and so would what it
    starts; the tests are about processes that somebody interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
