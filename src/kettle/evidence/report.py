"""Verdicts as tables for people. No torch, so `kettle verify` works on a laptop."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kettle.evidence.checks import Difference, Verdict, spans

if TYPE_CHECKING:
    from kettle.evidence.compare import Comparison, Judgement

_WORST = 10
"""How many differing tensors a table names; JSON names all."""


def eviction_table(verdict: Verdict) -> Table:
    """One row per eviction: step, time of the save, grace left and exit code."""
    table = Table(title="evictions", title_justify="left", header_style="bold")
    for heading in ("attempt", "step", "save ms", "grace left s", "exit"):
        table.add_column(heading, justify="right")
    table.add_column("checkpoint")
    for eviction in verdict.evictions:
        table.add_row(
            str(eviction.attempt),
            "-" if eviction.step is None else str(eviction.step),
            _figure(eviction.save_ms, digits=0),
            _figure(eviction.grace_left_s, digits=2),
            str(eviction.exit_code),
            eviction.outcome.replace("_", " "),
        )
    if not verdict.evictions:
        table.add_row(*["-"] * 5, "no eviction")
    return table


def verdict_table(verdict: Verdict) -> Table:
    """What the records of one run say, without any checkpoint."""
    table = _facts(verdict.run_id)
    _add_record_rows(table, verdict)
    table.add_row("verdict", _stamp("true" if verdict.verdict else "false", good=verdict.verdict))
    return table


def comparison_table(comparison: "Comparison") -> Table:
    """What two checkpoints have in common, with the worst differences by name."""
    table = _facts("checkpoints")
    table.add_row("reference", Text(comparison.reference_uri, overflow="fold"))
    table.add_row("trial", Text(comparison.trial_uri, overflow="fold"))
    _add_tensor_rows(table, comparison)
    word = "bit-identical" if comparison.identical else "different"
    table.add_row("verdict", _stamp(word, good=comparison.identical))
    return table


def summary_table(
    verdict: Verdict, comparison: "Comparison", *, floor: float, judgement: "Judgement"
) -> Table:
    """The whole proof: records of the trial, tensors against the reference, verdict and floor."""
    table = _facts(verdict.run_id)
    _add_record_rows(table, verdict)
    _add_tensor_rows(table, comparison)
    table.add_row("floor", f"{floor:g} (largest difference of two references)")
    good = verdict.verdict and judgement != "broken"
    # Equal weights prove little if the records don't add up, so they never stand alone.
    word = judgement if verdict.verdict else f"{judgement}, but the records do not add up"
    table.add_row("verdict", _stamp(word, good=good))
    return table


def difference_line(difference: Difference | None) -> str:
    """The first differing step in a sentence."""
    if difference is None:
        return "no common step differs in samples, learning rate, loss or gradient norm"
    return (
        f"first difference at step {difference.step}: {difference.field} is "
        f"{difference.trial} instead of {difference.reference}"
    )


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _add_record_rows(table: Table, verdict: Verdict) -> None:
    table.add_row("step records", f"{verdict.step_records} ({verdict.distinct_steps} distinct)")
    table.add_row("attempts", str(verdict.attempts))
    table.add_row("preemptions", str(verdict.preemptions))
    table.add_row("resumed from", ", ".join(map(str, verdict.resumed_from)) or "-")
    table.add_row("replayed", _counted(verdict.replayed_steps))
    table.add_row("missing", _counted(verdict.missing_steps))
    table.add_row("lost", _counted(verdict.lost_steps))


def _add_tensor_rows(table: Table, comparison: "Comparison") -> None:
    table.add_row("tensors compared", str(comparison.tensors))
    table.add_row("tensors that differ", str(len(comparison.differing)))
    table.add_row("largest difference", f"{comparison.largest_difference:g}")
    for tensor in comparison.differing[:_WORST]:
        share = f"{tensor.differing_elements} of {tensor.elements} elements"
        table.add_row("  differs", f"{tensor.name}: {tensor.max_abs_difference:g} ({share})")
    rest = len(comparison.differing) - _WORST
    if rest > 0:
        table.add_row("  differs", f"and {rest} more")
    for layout in comparison.layouts:
        table.add_row("  layout", f"{layout.name}: {layout.trial} instead of {layout.reference}")
    for label, names in (
        ("  only in reference", comparison.only_in_reference),
        ("  only in trial", comparison.only_in_trial),
    ):
        for name in names:
            table.add_row(label, name)


def _stamp(word: str, *, good: bool) -> Text:
    return Text(word, style="bold green" if good else "bold red")


def _counted(steps: Sequence[int]) -> str:
    return f"{len(steps)} ({spans(steps)})" if steps else "0"


def _figure(value: float | None, *, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
