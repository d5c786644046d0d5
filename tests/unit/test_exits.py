import os
import re

import pytest

from kettle import errors
from kettle.errors import KettleError
from kettle.exits import ExitCode

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, KettleError)
]


def test_exit_codes_are_the_published_ones() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "NO_CHECKPOINT": 3,
        "SUPERSEDED": 4,
        "NOT_SAVED": 74,
        "PREEMPTED": 75,
    }
    assert ExitCode.NOT_SAVED == os.EX_IOERR
    assert ExitCode.PREEMPTED == os.EX_TEMPFAIL


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_tree_in_the_docstring_shows_each_error_with_its_exit_code(
    error: type[KettleError],
) -> None:
    line = re.search(rf"\b{error.__name__} +exit (\d+)", errors.__doc__ or "")
    assert line is not None
    assert int(line[1]) == error.exit_code
