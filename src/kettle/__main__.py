"""The door for `kettle` and `python -m kettle`."""

import sys

from kettle import signals


def main() -> int:
    """Run the command line and return its exit status."""
    # Before any heavy import: a stop signal that comes first would kill the process or, sent to
    # PID 1, be dropped by the kernel. Other commands keep the usual meaning of Ctrl-C. And not when
    # this module is imported, which loader processes do; they must never let a stop signal in.
    if sys.argv[1:2] and sys.argv[1] in {"launch", "train"}:
        signals.install()
    from kettle.cli.app import run  # noqa: PLC0415 - after the handlers

    return run()


if __name__ == "__main__":
    sys.exit(main())
