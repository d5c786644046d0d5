"""Kill a short run at 200 random instants, and see that it always ends as one that nobody kills.

    python scripts/soak.py --kills 200 --seed 1

Each kill's instant follows from the seed and the kill's number alone. So `--first 120` does the
kills from number 120 on, with the same instants as a run from the beginning.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.soaking import Periodic, Store, soak


def main() -> int:
    """Soak each kind of store with each kind of save; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill")
    said = parser.parse_args()
    kinds = [(store, periodic) for store in get_args(Store) for periodic in get_args(Periodic)]
    numbers = [range(said.first + i, said.kills, len(kinds)) for i in range(len(kinds))]
    table: dict[tuple[str, str], Counter[str]] = {}
    faults: list[str] = []
    started = time.monotonic()
    for kind, kills in zip(kinds, numbers, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            done = soak(*kind, Path(folder), seed=said.seed, kills=kills, say=_say)
        table[kind] = done.hit + Counter({"kills": done.kills, "runs completed": done.runs})
        faults += done.faults
    _print(table)
    print(f"seed {said.seed}, {time.monotonic() - started:.0f} s, {len(faults)} faults")
    print(*faults, sep="\n")
    return 1 if faults else 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _print(table: dict[tuple[str, str], Counter[str]]) -> None:
    kinds = list(table)
    rows = sorted({row for hits in table.values() for row in hits})
    print(f"{'':18}", *(f"{' '.join(kind):>12}" for kind in kinds))
    for row in rows:
        print(f"{row:18}", *(f"{table[kind][row]:12}" for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
