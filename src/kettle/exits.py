"""What the exit status of every kettle process means."""

import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of `kettle` commands, launchers and workers.

    A Job's `podFailurePolicy` and the chaos driver read these, so they are a contract: a number
    never changes its meaning.

    A launcher ends with the status of its workers where all of them agree on one. Where they don't,
    or where one was killed, it ends with 1: an eviction in which a rank crashed is a crash.
    """

    OK = 0
    """The run reached `total_steps`, or the verdict is true."""

    FAILED = 1
    """A crash, ranks that disagree about how they ended, or a verdict that is false."""

    USAGE = 2
    """The command line, the run file or the data can't be used as given; nothing was started."""

    NO_CHECKPOINT = 3
    """Checkpoints were committed and none of them can be used. Starting again alone won't help: a
    person decides what to repair, or to begin from step 0 with `--from-scratch`."""

    SUPERSEDED = 4
    """A newer attempt has taken the run over, and this one was refused by the store. Its steps are
    the newer attempt's to take; nothing is lost but the time since the last checkpoint."""

    NOT_SAVED = os.EX_IOERR
    """74. The store failed: the last steps could not be saved, or nothing could be read. Started
    again once the store works, the run goes on from the newest checkpoint, if there is one, and
    takes the steps after it again."""

    PREEMPTED = os.EX_TEMPFAIL
    """75. The run was evicted, and every step that it took is in a checkpoint: start it again."""
