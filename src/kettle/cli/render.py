"""Text or JSON: data goes to stdout, talk to stderr."""

import json
import os
import sys
from typing import Any, TextIO

from pydantic import BaseModel
from rich.console import Console, RenderableType

_PLAIN_WIDTH = 100
"""Columns where no terminal says how many there are, such as in a file or a pod's log."""


def show(*renderables: RenderableType) -> None:
    """Print to stdout, coloured only on a terminal and never where NO_COLOR is set."""
    console = _console(sys.stdout)
    for renderable in renderables:
        console.print(renderable)


def show_json(document: BaseModel | dict[str, Any]) -> None:
    """Print one JSON document to stdout."""
    # Not through rich, which would wrap long lines.
    if isinstance(document, BaseModel):
        sys.stdout.write(document.model_dump_json(indent=2) + "\n")
    else:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def say(message: str) -> None:
    """Tell a person something on stderr, word for word."""
    _console(sys.stderr).print(message, markup=False, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    has_width = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, highlight=False, width=None if has_width else _PLAIN_WIDTH)
