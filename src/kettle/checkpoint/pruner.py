"""Retention beside training."""

import logging
import threading
from collections.abc import Sequence

from kettle.checkpoint.catalog import Folder
from kettle.checkpoint.digest import verify_object
from kettle.checkpoint.filesystem import store_faults
from kettle.checkpoint.layout import MARKER, Place, join
from kettle.checkpoint.log import Lease
from kettle.checkpoint.marker import read_marker
from kettle.checkpoint.protocol import prune
from kettle.checkpoint.retention import Policy
from kettle.errors import SupersededError, TornCheckpointError

log = logging.getLogger(__name__)


class Pruner:
    """Deletes in a thread of its own, so that nobody waits for it.

    It may be cut off at any time: what is half deleted has no marker any more.

    Attributes:
        verified: folders of which this attempt has read every byte.
    """

    def __init__(self, *, policies: Sequence[Policy], debris_age_s: float) -> None:
        self.verified: set[str] = set()
        self._policies = policies
        self._debris_age_s = debris_age_s
        self._thread: threading.Thread | None = None

    def start(self, lease: Lease, *, newest: Place) -> None:
        """Begin to delete what no policy keeps, unless the time before is still at it."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=self._prune, args=(lease, newest), name="retention", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being deleted any more."""
        if self._thread is not None:
            self._thread.join()

    def _prune(self, lease: Lease, newest: Place) -> None:
        try:
            with store_faults():
                prune(
                    lease,
                    policies=self._policies,
                    newest=newest,
                    verified=self.verified,
                    verify=lambda folder: self._verify(lease, folder),
                    debris_age_s=self._debris_age_s,
                )
        except SupersededError:
            return  # the next commit says so, and ends the attempt
        except OSError as error:
            log.warning("could not delete old checkpoints below %s: %s", lease.uri, error)

    def _verify(self, lease: Lease, folder: Folder) -> bool:
        path, uri = join(lease.prefix, folder.name), join(lease.uri, folder.name)
        try:
            marker = read_marker(lease.filesystem.cat_file(join(path, MARKER)), uri=uri)
            for name, expected in marker.objects.items():
                verify_object(
                    lease.filesystem, join(path, name), expected, uri=uri, progress=_silent
                )
        except TornCheckpointError as error:
            log.warning("retention found a damaged checkpoint: %s", error)
            return False
        self.verified.add(folder.name)
        return True


def _silent(_count: int) -> None:
    """A worker shows no progress."""
