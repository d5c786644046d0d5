"""Which keys a checkpoint must hold."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from kettle.errors import CheckpointError


class ExactKeys(DefaultLoadPlanner):
    """Refuses a checkpoint whose keys are not exactly those of the run.

    torch's planner raises for a missing key but ignores a foreign one, which is how a renamed
    part is lost without a word.
    """

    def __init__(self, expected: Iterable[str], *, uri: str) -> None:
        super().__init__()
        self._expected = set(expected)
        self._uri = uri

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the interface's
    ) -> None:
        """Compare the key sets both ways before anything is read."""
        assert metadata is not None
        found = set(metadata.state_dict_metadata)
        if found != self._expected:
            raise CheckpointError(
                f"{self._uri} does not hold the parts of this run\n"
                f"  missing  {_some(self._expected - found)}\n"
                f"  foreign  {_some(found - self._expected)}\n"
                "  it was written by another version of kettle or for another model"
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _some(keys: set[str]) -> str:
    shown = sorted(keys)[:5]
    more = len(keys) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")
