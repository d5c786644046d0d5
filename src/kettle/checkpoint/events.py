"""What a run's log tells: an event an entry, and the state that follows from all. Pure."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kettle.checkpoint.layout import place_of
from kettle.checkpoint.marker import Marker
from kettle.exits import ExitCode


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Claimed(_Frozen):
    """An attempt has taken the run over; older generations may write no more."""

    kind: Literal["claimed"] = "claimed"
    from_scratch: bool = Field(
        default=False, description="Whether all checkpoints before are left behind, by request."
    )


class Committed(_Frozen):
    """The right to commit a checkpoint whose objects are all durable. `_COMMIT` follows."""

    kind: Literal["committed"] = "committed"
    name: str = Field(description="Folder of the checkpoint, below the run's prefix.")
    marker: Marker = Field(description="What `_COMMIT` says, for an attempt that has to heal it.")


class Restored(_Frozen):
    """Training goes on from a checkpoint whose every byte was read and that has its marker.

    Written where it says anything new: the newest one did not hold, or its writer died between the
    log's entry and the marker.
    """

    kind: Literal["restored"] = "restored"
    name: str
    damaged: dict[str, str] = Field(description="Folders passed over, with the reason.")


class Ended(_Frozen):
    """The attempt has left in order: the marker of the newest checkpoint is written.

    Unless the exit code says that a save has failed: that may have been the marker's.
    """

    kind: Literal["ended"] = "ended"
    step: int = Field(description="The last finished step.")
    exit_code: int


class Quarantined(_Frozen):
    """A checkpoint is set aside: it is whole, but nothing could be trained from it."""

    kind: Literal["quarantined"] = "quarantined"
    name: str
    reason: str


class Released(_Frozen):
    """A person has taken a checkpoint out of quarantine."""

    kind: Literal["released"] = "released"
    name: str


class Failed(_Frozen):
    """The attempt that held the run has crashed."""

    kind: Literal["failed"] = "failed"
    step: int | None = Field(description="The last finished step, where it is known.")
    error: str


Event: TypeAlias = Annotated[
    Claimed | Committed | Restored | Ended | Quarantined | Released | Failed,
    Field(discriminator="kind"),
]


class Failures(_Frozen):
    """Attempts in a row that crashed at one step without having committed anything."""

    checkpoint: str | None = Field(description="Which checkpoint they had begun from.")
    step: int | None
    count: int
    generation: int = Field(description="The latest of them.")
    error: str


class LastChance(_Frozen):
    """After a quarantine: the older checkpoint is tried once, and has to get past a step."""

    quarantined: str
    past_step: int


class LogState(_Frozen):
    """What all entries up to one say together.

    Attributes:
        generation: the newest claim's; the next one takes the number after it.
        attempt_id: who made it.
        newest: folder of the checkpoint to resume from, as far as the log knows.
        unproven: the entry that granted it, as long as its marker may not be written yet.
        from_generation: checkpoints of older generations are left behind.
        damaged: folders that an attempt has found not to be what their marker says.
        has_gap: an entry after the one that named `newest` can't be read, and may have named a
            younger one.
    """

    generation: int = 0
    attempt_id: str = ""
    newest: str | None = None
    unproven: int | None = None
    from_generation: int = 0
    damaged: Mapping[str, str] = Field(default_factory=dict)
    quarantined: Mapping[str, str] = Field(default_factory=dict)
    failures: Failures | None = None
    last_chance: LastChance | None = None
    has_gap: bool = False


def after(state: LogState, event: Event, *, number: int, attempt_id: str) -> LogState:  # noqa: PLR0911 - one return a kind of event
    """The state that an event leads to: pure."""
    match event:
        case Claimed():
            claimed = {"generation": state.generation + 1, "attempt_id": attempt_id}
            if not event.from_scratch:
                return state.model_copy(update=claimed)
            return LogState(
                generation=state.generation + 1,
                attempt_id=attempt_id,
                from_generation=state.generation + 1,
                damaged=state.damaged,
                quarantined=state.quarantined,
            )
        case Committed():
            over = state.last_chance is not None and event.marker.step > state.last_chance.past_step
            return state.model_copy(
                update={
                    "newest": event.name,
                    "unproven": number,
                    "has_gap": False,
                    "failures": None,
                    "last_chance": None if over else state.last_chance,
                }
            )
        case Restored():
            damaged = {**state.damaged, **event.damaged}
            # Found whole after all, as where a store had shown only a part of it.
            damaged.pop(event.name, None)
            return state.model_copy(
                update={
                    "newest": event.name,
                    "unproven": None,
                    "has_gap": False,
                    "damaged": damaged,
                }
            )
        case Ended():
            # After a save that failed the marker may be missing, and what it proves is there.
            not_saved = event.exit_code == ExitCode.NOT_SAVED
            return state if not_saved else state.model_copy(update={"unproven": None})
        case Quarantined():
            failed_at = state.failures.step if state.failures else None
            place = place_of(event.name)
            past_step = max(failed_at or 0, place.step if place else 0)
            return state.model_copy(
                update={
                    "newest": None,
                    "unproven": None,
                    "quarantined": {**state.quarantined, event.name: event.reason},
                    "failures": None,
                    "last_chance": LastChance(quarantined=event.name, past_step=past_step),
                }
            )
        case Released():
            left = {n: reason for n, reason in state.quarantined.items() if n != event.name}
            # Looked for anew, with a listing: the released one may be the newest again.
            return state.model_copy(
                update={
                    "newest": None,
                    "unproven": None,
                    "quarantined": left,
                    "failures": None,
                    "last_chance": None,
                }
            )
        case Failed():
            return state.model_copy(update={"failures": _failures(state, event)})


def after_a_gap(state: LogState, *, entries: int) -> LogState:
    """The state where so many entries after it can't be read: pure.

    Each of them may have been a claim, whose generation nobody else may take.
    """
    if not entries:
        return state
    return state.model_copy(update={"generation": state.generation + entries, "has_gap": True})


def _failures(state: LogState, event: Failed) -> Failures:
    before = state.failures
    if before is not None and before.generation == state.generation:
        return before  # several ranks of one attempt
    same = before is not None and (before.checkpoint, before.step) == (state.newest, event.step)
    return Failures(
        checkpoint=state.newest,
        step=event.step,
        count=1 + (before.count if before is not None and same else 0),
        generation=state.generation,
        error=event.error,
    )
