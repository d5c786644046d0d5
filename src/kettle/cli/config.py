"""`kettle config`: what a run file says, and which run it is. No torch."""

# ruff: noqa: PLC0415 - as in every command: `kettle --help` waits for no import of another command

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from kettle.cli.launch import Overrides, RunFile

config = typer.Typer(
    name="config",
    help="Look at a run file without running it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@config.command()
def show(run_file: RunFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the whole configuration that a run would use, defaults and overrides included.

    As TOML it is a run file again; a field whose value is "none" is left out.

    Example: kettle config show examples/stdlib.toml --set experiment.total_steps=20
    """
    from kettle.cli.render import show_json
    from kettle.config import load

    resolved = load(run_file, overrides or [])
    if as_json:
        show_json(resolved)
    else:
        typer.echo("\n".join(_toml_lines(resolved.model_dump(mode="json"))))


@config.command()
def fingerprint(run_file: RunFile, *, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print which run this is: its run id, its fingerprint and the digest of its data.

    Reads the data, since another text makes another run. Starts nothing.

    Example: kettle config fingerprint examples/stdlib.toml
    """
    from kettle.cli.render import show_json
    from kettle.config import load
    from kettle.data.identify import identify

    identity = identify(load(run_file, overrides or []))
    if as_json:
        show_json(dataclasses.asdict(identity))
    else:
        typer.echo(f"run id       {identity.run_id}")
        typer.echo(f"fingerprint  {identity.fingerprint}")
        typer.echo(f"data digest  {identity.data_digest}")


@config.command()
def schema() -> None:
    """Print the JSON Schema of a run file, for an editor or another program.

    Example: kettle config schema
    """
    from kettle.cli.render import show_json
    from kettle.config import RunConfig

    show_json(RunConfig.model_json_schema())


def _toml_lines(section: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A section's values, then its subsections: what stands below a header belongs to it."""
    for key, value in section.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{key} = {_toml_value(value)}"
    for key, value in section.items():
        if isinstance(value, Mapping):
            inner = f"{path}.{key}".lstrip(".")
            yield f"\n[{inner}]"
            yield from _toml_lines(value, inner)


def _toml_value(value: str | float) -> str:
    # JSON and TOML write these alike, but for one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
