"""The same as `kettle chaos`, for those who look for it among the scripts."""

import sys

from kettle.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["chaos", *sys.argv[1:]]))
