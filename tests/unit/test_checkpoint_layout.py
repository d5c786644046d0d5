from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kettle.checkpoint.filesystem import absolute, refuse_unusable
from kettle.checkpoint.layout import checkpoint_name, is_own_object, join, place_of
from kettle.checkpoint.schedule import SaveSchedule
from kettle.errors import UsageError


@given(step=st.integers(0, 10**9), attempt=st.text(max_size=40))
def test_name_says_its_step_whatever_the_attempt_is_called(step: int, attempt: str) -> None:
    place = place_of(checkpoint_name(step, generation=7, attempt_id=attempt))
    assert place is not None
    assert (place.step, place.generation) == (step, 7)


@given(steps=st.lists(st.integers(0, 10**8 - 1), min_size=2, max_size=9, unique=True))
def test_names_sort_by_step(steps: list[int]) -> None:
    names = sorted(checkpoint_name(step, generation=1, attempt_id="a") for step in steps)
    assert [place.step for name in names if (place := place_of(name))] == sorted(steps)


@given(generations=st.lists(st.integers(0, 9999), min_size=2, max_size=9, unique=True))
def test_names_of_one_step_sort_by_generation(generations: list[int]) -> None:
    names = [checkpoint_name(5, generation=g, attempt_id=f"{-g}") for g in generations]
    places = sorted(place for name in names if (place := place_of(name)))
    assert [place.name for place in places] == sorted(names)
    assert [place.generation for place in places] == sorted(generations)


@pytest.mark.parametrize(
    "name",
    ["step-1-g0001-a", "step-00000001", "step-00000001-a", "final", "step-00000001-g0001-A", ""],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert place_of(name) is None


@pytest.mark.parametrize("name", ["__0_0.distcp", "__31_0.distcp", "metadata.json", "_COMMIT"])
def test_objects_of_a_checkpoint_are_known_by_name(name: str) -> None:
    assert is_own_object(name)


@pytest.mark.parametrize("name", ["notes.txt", "x__0_0.distcp", "__0_0.distcp.bak", "_COMMIT2", ""])
def test_what_a_person_put_into_a_folder_is_not_kettles_own(name: str) -> None:
    assert not is_own_object(name)


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
