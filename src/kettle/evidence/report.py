"""Verdicts as tables and a plot for people. No torch, so `kettle verify` works on a laptop."""

# ruff: noqa: PLC0415 - matplotlib is an extra, and only the plot needs it

from collections.abc import Iterable, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kettle.errors import UsageError
from kettle.evidence.checks import Difference, Verdict, spans
from kettle.evidence.timeline import Attempt
from kettle.records import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kettle.evidence.compare import Comparison, Judgement

_MOST_ROWS = 10
"""How many tensors of a kind a table names; JSON names all."""

_INK, _PALE, _FAINT = "#333333", "#c9d3de", "#8a8a8a"
_ATTEMPT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a24b86", "#b07c00", "#2f8fc4", "#6b4c9a")
"""Dark enough for thin lines, and apart for colour-blind eyes too."""

_LEGEND_ROWS = 10
"""Above this many attempts a legend would bury the curve."""

_LABEL_ROW_PT = 13.0
_LABEL_GAP_PX = 8.0


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
        return (
            "no common step differs in samples, learning rate, streams, loss, gradients or weights"
        )
    return (
        f"first difference at step {difference.step}: {difference.field} is "
        f"{difference.trial} instead of {difference.reference}"
    )


def origin_lines(comparison: "Comparison") -> list[str]:
    """A sentence for each way in which the two are no checkpoints of one moment of one run."""
    reference, trial = comparison.reference, comparison.trial
    lines = []
    if not comparison.same_run:
        lines.append(
            f"the checkpoints are of different runs: {reference.run_id} and {trial.run_id}"
        )
    if not comparison.same_step:
        lines.append(f"the checkpoints are of different steps: {reference.step} and {trial.step}")
    return lines


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
    _add_capped(table, "alarm", list(verdict.alarms))


def _add_tensor_rows(table: Table, comparison: "Comparison") -> None:
    table.add_row("tensors compared", str(comparison.tensors))
    table.add_row("tensors that differ", str(len(comparison.differing)))
    table.add_row("largest difference", f"{comparison.largest_difference:g}")
    if comparison.differing_integer_tensors:
        # A random stream's word has no size of difference, so it's no part of the largest.
        count = f"{comparison.differing_integer_tensors} (random streams, counts, positions)"
        table.add_row("integer tensors that differ", count)
    _add_capped(
        table,
        "  differs",
        [
            f"{t.name}: {t.max_abs_difference:g} ({t.differing_elements} of {t.elements} elements)"
            for t in comparison.differing
        ],
    )
    _add_capped(
        table,
        "  layout",
        [f"{lay.name}: {lay.trial} instead of {lay.reference}" for lay in comparison.layouts],
    )
    _add_capped(table, "  only in reference", comparison.only_in_reference)
    _add_capped(table, "  only in trial", comparison.only_in_trial)


def _add_capped(table: Table, label: str, words: Sequence[str]) -> None:
    for word in words[:_MOST_ROWS]:
        table.add_row(label, Text(word))
    if len(words) > _MOST_ROWS:
        table.add_row(label, f"and {len(words) - _MOST_ROWS} more")


def _stamp(word: str, *, good: bool) -> Text:
    return Text(word, style="bold green" if good else "bold red")


def _counted(steps: Sequence[int]) -> str:
    return f"{len(steps)} ({spans(steps)})" if steps else "0"


def _figure(value: float | None, *, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def plot_loss(
    reference: Sequence[Attempt], trial: Sequence[Attempt], out_dir: Path
) -> tuple[Path, Path]:
    """Write `loss.png` and `loss.svg`, the same bytes for the same records and matplotlib.

    The reference lies below as a wide pale line and the trial on it, one colour per attempt, with
    a labelled mark at each eviction.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "a plot needs matplotlib, which is not installed; run pip install 'kettle[report]'"
        ) from error

    out_dir.mkdir(parents=True, exist_ok=True)
    png, svg = out_dir / "loss.png", out_dir / "loss.svg"
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so glyphs don't depend on the system
        "font.size": 10.0,
        "svg.fonttype": "path",
        "svg.hashsalt": "kettle",  # identifiers in the SVG are random without it
    }
    with mpl.rc_context(style):
        # A Figure of its own, not pyplot's, so nothing global is left behind.
        figure = Figure(figsize=(9.0, 4.8), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        _draw_curves(axes, reference=reference, trial=trial)
        _frame(axes)
        # Where a name falls is known only after the layout has settled.
        figure.draw_without_rendering()
        evicted = [a.preemption.step for a in trial if a.preemption]
        rows = _mark_evictions(axes, [step for step in evicted if step is not None])
        title = f"{trial[0].run_id}: interrupted on uninterrupted" if trial else "loss"
        axes.set_title(
            title, loc="left", color=_INK, fontweight="bold", pad=8 + _LABEL_ROW_PT * rows
        )
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def _draw_curves(axes: "Axes", *, reference: Sequence[Attempt], trial: Sequence[Attempt]) -> None:
    for attempt in reference:
        steps, losses = _curve(attempt.steps)
        axes.plot(steps, losses, color=_PALE, linewidth=8, solid_capstyle="round")
    axes.plot([], [], color=_PALE, linewidth=8, label="reference, uninterrupted")
    reached: dict[int, float] = {}
    named = len(trial) <= _LEGEND_ROWS
    for number, attempt, colour in zip(count(1), trial, cycle(_ATTEMPT_COLOURS), strict=False):
        if not attempt.steps:
            continue
        steps, losses = _curve(attempt.steps)
        own = 0
        if attempt.resumed_from in reached:
            # From the restored step on, so that the curve has no gap; its dot is another's.
            steps.insert(0, attempt.resumed_from)
            losses.insert(0, reached[attempt.resumed_from])
            own = 1
        axes.plot(
            steps,
            losses,
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=2.8,
            markevery=slice(own, None),
            label=f"attempt {number}" if named else None,
        )
        reached |= dict(zip(steps, losses, strict=True))
    if not named:
        axes.plot(
            [], [], color=_INK, linewidth=1.8, label=f"{len(trial)} attempts, colours in turn"
        )


def _curve(steps: Iterable[Step]) -> tuple[list[int], list[float]]:
    points = [(step.step, step.loss) for step in steps]
    return [step for step, _ in points], [loss for _, loss in points]


def _frame(axes: "Axes") -> None:
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel("training loss (nats per token)", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(_FAINT)
    axes.tick_params(color=_FAINT, labelcolor=_INK)
    axes.grid(axis="y", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.015)
    axes.plot([], [], color=_FAINT, linewidth=1.0, linestyle=(0, (3, 3)), label="eviction")
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def _mark_evictions(axes: "Axes", steps: Iterable[int]) -> int:
    """Draw a line after each evicted step, named above; returns the rows that the names take."""
    row_ends: list[float] = []
    for step in sorted(steps):
        axes.axvline(step + 0.5, color=_FAINT, linewidth=1.0, linestyle=(0, (3, 3)), zorder=1.5)
        name = axes.annotate(
            f"step {step}",
            xy=(step + 0.5, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0.0, 0.0),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color=_INK,
            annotation_clip=False,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            arrowprops={"arrowstyle": "-", "color": _FAINT, "linewidth": 0.7, "shrinkA": 0.0},
        )
        extent = name.get_window_extent()
        fits = (row for row, end in enumerate(row_ends) if end < extent.x0)
        row = next(fits, len(row_ends))
        row_ends[row : row + 1] = [extent.x1 + _LABEL_GAP_PX]
        # Lower names come later, so that they cover the lines up to higher ones.
        name.set_zorder(5.0 - 0.01 * row)
        name.set_position((0.0, 4.0 + _LABEL_ROW_PT * row))
    return len(row_ends)
