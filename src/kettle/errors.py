"""Every exception that kettle raises on purpose.

    KettleError                 exit 1
    ├── UsageError              exit 2   the command line asks for something impossible
    │   └── ConfigError         exit 2   a field of the run file
    ├── DataError               exit 2   the input data can't be read or is too small
    ├── CheckpointError         exit 1   a checkpoint can't be written or restored
    │   ├── TornCheckpointError exit 1   it has no marker, or its content does not hold
    │   ├── SaveError           exit 74  a checkpoint could not be written; training can go on
    │   ├── StoreError          exit 74  the store can't be read, or can't be written to at all
    │   ├── NoCheckpointError   exit 3   checkpoints were committed and none of them is usable
    │   └── SupersededError     exit 4   a newer attempt has taken the run over
    ├── EvidenceError           exit 2   logs or checkpoints given to a verdict can't be read
    ├── TiedWeightsError        exit 1   embedding and output head are not one tensor
    └── StepError               exit 1   a step has no finite result, or nothing to learn from

A message says what is wrong, which value was found, and what to do about it.
"""

from kettle.exits import ExitCode


class KettleError(Exception):
    """Base of all expected errors; `exit_code` is what the process ends with."""

    exit_code = ExitCode.FAILED


class UsageError(KettleError, ValueError):
    """The command line asks for something impossible."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """A field of the run file is unknown, of a wrong type or in conflict with another."""


class DataError(KettleError, ValueError):
    """The input data can't be read, or is too small for one step."""

    exit_code = ExitCode.USAGE


class CheckpointError(KettleError, OSError):
    """A checkpoint can't be written or restored."""


class TornCheckpointError(CheckpointError):
    """A checkpoint without a marker, or whose content is not what the marker says."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; what was saved before is untouched."""

    exit_code = ExitCode.NOT_SAVED


class StoreError(CheckpointError):
    """The store fails. That says nothing about the checkpoints in it."""

    exit_code = ExitCode.NOT_SAVED


class NoCheckpointError(CheckpointError):
    """The run has committed before, and nothing of that can be used."""

    exit_code = ExitCode.NO_CHECKPOINT


class SupersededError(CheckpointError):
    """A newer attempt has claimed the run, so this one may no longer write into it."""

    exit_code = ExitCode.SUPERSEDED


class EvidenceError(KettleError, ValueError):
    """Logs or checkpoints handed to a verdict can't be read."""

    exit_code = ExitCode.USAGE


class TiedWeightsError(KettleError, RuntimeError):
    """Embedding and output head were configured as one tensor and are two."""


class StepError(KettleError, ArithmeticError):
    """Loss or gradient are not finite, or the batch has no token to learn from.

    Nothing of the step was applied: going on would only spoil the checkpoints.
    """
