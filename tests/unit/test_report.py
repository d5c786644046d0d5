import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kettle.errors import UsageError
from kettle.evidence.checks import Difference, verify
from kettle.evidence.compare import Comparison, LayoutDifference, Origin, TensorDifference
from kettle.evidence.report import (
    comparison_table,
    difference_line,
    eviction_table,
    origin_lines,
    plot_loss,
    summary_table,
    verdict_table,
)
from kettle.evidence.timeline import Attempt, attempts_of
from support.logs import flat, interrupted_run, preempted, started

ORIGIN = Origin(run_id="tiny-0b77c1d2aa90", step=12)


def attempts(*boundaries: int) -> Sequence[Attempt]:
    return attempts_of(flat(interrupted_run(*boundaries)))


def comparison(
    *differing: TensorDifference,
    layouts: tuple[LayoutDifference, ...] = (),
    trial: Origin = ORIGIN,
) -> Comparison:
    return Comparison(
        reference_uri="/reference/step-00000012",
        trial_uri="/trial/step-00000012",
        reference=ORIGIN,
        trial=trial,
        tensors=41,
        differing=differing,
        only_in_reference=(),
        only_in_trial=(),
        layouts=layouts,
    )


def tensor(name: str, *, gap: float) -> TensorDifference:
    return TensorDifference(
        name=name, kind="floating", differing_elements=1, elements=9, max_abs_difference=gap
    )


def printed(renderable: RenderableType) -> list[list[str]]:
    """The cells of each row as text."""
    stream = StringIO()
    Console(file=stream, width=100).print(renderable)
    lines = (line.replace("┃", "│") for line in stream.getvalue().splitlines())
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def facts(renderable: RenderableType) -> dict[str, str]:
    return {row[0]: row[1] for row in printed(renderable)}


def test_an_eviction_is_a_row_with_step_save_grace_and_exit() -> None:
    rows = printed(eviction_table(verify(attempts(4, 9, 12))))
    assert rows[0] == ["attempt", "step", "save ms", "grace left s", "exit", "checkpoint"]
    assert rows[1:] == [
        ["1", "4", "42", "29.50", "75", "saved"],
        ["2", "9", "42", "29.50", "75", "saved"],
    ]


def test_what_an_eviction_does_not_know_is_a_dash() -> None:
    rows = printed(eviction_table(verify(attempts_of([started("a"), preempted("a", None)]))))
    assert rows[1][1:] == ["-", "-", "29.50", "75", "nothing new"]


def test_a_run_without_eviction_says_so() -> None:
    assert printed(eviction_table(verify(attempts(12))))[1][-1] == "no eviction"


def test_the_verdict_table_says_what_the_records_say() -> None:
    assert facts(verdict_table(verify(attempts(4, 9, 12)))) == {
        "step records": "12 (12 distinct)",
        "attempts": "3",
        "preemptions": "2",
        "resumed from": "4, 9",
        "replayed": "0",
        "missing": "0",
        "lost": "0",
        "verdict": "true",
    }


def test_missing_steps_are_counted_and_named() -> None:
    unfinished = attempts_of(flat(interrupted_run(4, 9, 12)[:2]))
    assert facts(verdict_table(verify(unfinished)))["missing"] == "3 (10-12)"


def test_the_summary_joins_records_tensors_and_floor() -> None:
    table = summary_table(
        verify(attempts(4, 12)), comparison(), floor=0.0, judgement="bit-identical"
    )
    found = facts(table)
    assert found["tensors compared"] == "41"
    assert found["floor"].startswith("0 ")
    assert found["verdict"] == "bit-identical"


def test_equal_tensors_do_not_excuse_records_that_do_not_add_up() -> None:
    broken = verify(attempts_of(flat(interrupted_run(4, 9, 12)[1:])))
    found = facts(summary_table(broken, comparison(), floor=0.0, judgement="bit-identical"))
    assert found["verdict"] == "bit-identical, but the records do not add up"


def test_a_differing_tensor_is_named_with_its_difference() -> None:
    rows = printed(comparison_table(comparison(tensor("model.norm.weight", gap=0.5))))
    assert ["differs", "model.norm.weight: 0.5 (1 of 9 elements)"] in rows


def test_many_differing_tensors_are_named_in_part_and_counted() -> None:
    many = [tensor(f"model.{number}", gap=1.0) for number in range(14)]
    rows = printed(comparison_table(comparison(*many)))
    assert rows.count(["differs", "and 4 more"]) == 1


def test_many_other_layouts_are_named_in_part_and_counted() -> None:
    many = [
        LayoutDifference(name=f"model.{n}", reference="float32[2, 3]", trial="float32[3, 2]")
        for n in range(14)
    ]
    rows = printed(comparison_table(comparison(layouts=tuple(many))))
    assert ["layout", "model.9: float32[3, 2] instead of float32[2, 3]"] in rows
    assert [row for row in rows if row[0] == "layout"][10:] == [["layout", "and 4 more"]]


def test_differing_integers_are_counted_beside_the_largest_difference() -> None:
    stream = tensor("rng.vrank0.python", gap=247.0).model_copy(update={"kind": "integer"})
    found = facts(comparison_table(comparison(tensor("model.w", gap=0.5), stream)))
    assert found["largest difference"] == "0.5"
    assert found["integer tensors that differ"].startswith("1 ")


def test_checkpoints_of_one_step_of_one_run_need_no_word() -> None:
    assert origin_lines(comparison()) == []


def test_checkpoints_of_other_runs_and_steps_are_told_in_sentences() -> None:
    assert origin_lines(comparison(trial=Origin(run_id="tiny-ae5bc7e54e1a", step=9))) == [
        "the checkpoints are of different runs: tiny-0b77c1d2aa90 and tiny-ae5bc7e54e1a",
        "the checkpoints are of different steps: 12 and 9",
    ]


def test_the_first_difference_is_a_sentence() -> None:
    difference = Difference(step=7, field="lr", reference=0.5, trial=0.25)
    assert difference_line(difference) == "first difference at step 7: lr is 0.25 instead of 0.5"


def test_a_plot_is_a_png_and_an_svg(tmp_path: Path) -> None:
    png, svg = plot_loss(attempts(12), attempts(4, 9, 12), tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert (png.name, svg.name) == ("loss.png", "loss.svg")


def test_the_same_records_give_the_same_plots(tmp_path: Path) -> None:
    first = plot_loss(attempts(12), attempts(4, 9, 12), tmp_path / "first")
    second = plot_loss(attempts(12), attempts(4, 9, 12), tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_plot_of_evictions_at_every_step_is_drawn(tmp_path: Path) -> None:
    png, _ = plot_loss(attempts(12), attempts(*range(1, 13)), tmp_path)
    assert png.stat().st_size > 0


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an absent package looks like
    with pytest.raises(UsageError, match=r"pip install 'kettle\[report\]'"):
        plot_loss(attempts(12), attempts(12), tmp_path)
