"""Which run a configuration is on this machine: needs the data's digest, and no torch."""

from dataclasses import dataclass

from kettle.config import RunConfig
from kettle.data.order import order_of
from kettle.data.sources import count_samples, digest, read_documents
from kettle.identity import fingerprint, run_id


@dataclass(frozen=True)
class Identity:
    """Who a run is.

    Attributes:
        fingerprint: 64 hex digits.
        run_id: `<name>-<12 hex>`.
        data_digest: 64 hex digits.
    """

    fingerprint: str
    run_id: str
    data_digest: str


def identify(config: RunConfig) -> Identity:
    """Read the data and name the run.

    Raises:
        DataError: the data can't be read, or is smaller than one step.
    """
    documents = read_documents(config.experiment.data, path=config.runtime.data_path)
    order_of(config.experiment, samples=count_samples(documents, config.experiment.data))
    data_digest = digest(documents)
    mark = fingerprint(config.experiment, data_digest=data_digest)
    return Identity(fingerprint=mark, run_id=run_id(config.name, mark), data_digest=data_digest)
