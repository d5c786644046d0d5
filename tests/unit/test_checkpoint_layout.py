from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.checkpoint.filesystem import absolute, refuse_unusable
from kettle.checkpoint.layout import checkpoint_name, join, step_of
from kettle.checkpoint.schedule import SaveSchedule
from kettle.errors import UsageError


@given(step=st.integers(0, 10**9), attempt=st.text(max_size=40))
def test_name_says_its_step_whatever_the_attempt_is_called(step: int, attempt: str) -> None:
    assert step_of(checkpoint_name(step, attempt_id=attempt)) == step


@given(steps=st.lists(st.integers(0, 10**8 - 1), min_size=2, max_size=9, unique=True))
def test_names_sort_by_step(steps: list[int]) -> None:
    names = sorted(checkpoint_name(step, attempt_id="a") for step in steps)
    assert [step_of(name) for name in names] == sorted(steps)


@pytest.mark.parametrize("name", ["step-1-a", "step-00000001", "final", "step-00000001-A", ""])
def test_other_names_say_no_step(name: str) -> None:
    assert step_of(name) is None


def test_join_keeps_the_scheme() -> None:
    assert join("s3://bucket/", "run", "step") == "s3://bucket/run/step"


def test_relative_root_is_the_same_place_from_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert absolute("out") == f"{tmp_path}/out"
    assert absolute("s3://bucket/out") == "s3://bucket/out"


@pytest.mark.parametrize(
    ("every", "due"), [(None, [10]), (3, [3, 6, 9, 10]), (5, [5, 10]), (99, [10])]
)
def test_last_step_is_always_saved(every: int | None, due: list[int]) -> None:
    schedule = SaveSchedule(every=every, total_steps=10)
    assert [step for step in range(1, 11) if schedule.due(step)] == due
    assert schedule.due(10) == "final"


def test_root_that_is_a_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"checkpoint\.root = .*file.* can't be used"):
        refuse_unusable(str(tmp_path / "file" / "below"))


def test_root_of_an_unknown_scheme_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.root = 'nowhere://x'.*Protocol not known"):
        refuse_unusable("nowhere://x")


def test_root_in_memory_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.root = 'memory://x' is gone when"):
        refuse_unusable("memory://x")


def test_root_that_no_path_can_have_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"can't be used: .*null"):
        refuse_unusable("a\0b")


def test_local_root_is_made_where_it_is_missing(tmp_path: Path) -> None:
    refuse_unusable(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
