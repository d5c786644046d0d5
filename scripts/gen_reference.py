"""Write the pages under docs/reference/ from the code; with --check, only say which are stale."""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from typer.cli import get_docs_for_click

from kettle import errors, exits, records
from kettle.cli.app import app
from kettle.config import RunConfig

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTICE = "<!-- Written by `make reference` from the code. Edit the code instead. -->\n"


def pages() -> dict[str, str]:
    """File name below docs/reference/ to the text that belongs there."""
    return {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "config.schema.json": as_json(RunConfig.model_json_schema()),
        "exit-codes.md": exit_codes_page(),
        "records.md": records_page(),
        "records.schema.json": as_json(records.json_schema()),
    }


def cli_page() -> str:
    """Every command with its arguments and options."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="kettle")
    text = get_docs_for_click(obj=command, ctx=context, name="kettle", title="Command line")
    return NOTICE + "\n" + text.strip() + "\n"


def config_page() -> str:
    """A table for each section of the run file."""
    lines = [
        NOTICE,
        "# Run file",
        "",
        "A run file is TOML. Everything in `experiment` changes what is computed, so it is hashed;",
        "the run id is the name and the beginning of that hash. Nothing else makes another run.",
        "Unknown keys are refused. Any field can be overridden on the command line:",
        "`--set experiment.optim.lr=1e-4`.",
        "",
        "The same as [JSON Schema](config.schema.json).",
    ]
    for path, section in sections(RunConfig, ""):
        title = f"`[{path}]`" if path else "Top level"
        hashed = "yes" if path.split(".")[0] == "experiment" else "no"
        properties = section.model_json_schema()["properties"]
        rows = [
            (
                f"`{name}`",
                type_words(properties[name]),
                default_words(section, name),
                hashed,
                field.description or "",
            )
            for name, field in section.model_fields.items()
            if not is_section(field.annotation)
        ]
        lines += ["", f"## {title}", "", " ".join((section.__doc__ or "").split()), ""]
        lines += table(("Field", "Type", "Default", "Hashed", "Meaning"), rows)
    return "\n".join(lines) + "\n"


def records_page() -> str:
    """A table for each kind of record."""
    union, *_ = get_args(records.Record)
    lines = [
        NOTICE,
        "# Records",
        "",
        "A run writes JSONL to stdout: one flat record a line, whose `event` says its kind.",
        "Readers ignore fields that they don't know and lines that are no records.",
        "",
        "The same as [JSON Schema](records.schema.json).",
    ]
    for record in get_args(union):
        properties = record.model_json_schema(mode="serialization")["properties"]
        event = record.model_fields["event"].default
        rows = [
            (f"`{name}`", type_words(properties[name]), field.description or "")
            for name, field in record.model_fields.items()
            if name != "event"
        ]
        lines += ["", f"## `{event}`", "", " ".join((record.__doc__ or "").split()), ""]
        lines += table(("Field", "Type", "Meaning"), rows)
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    """What each exit status means, and which error ends with which."""
    codes = [
        (str(int(code)), f"`{code.name}`", meaning.removeprefix(f"{int(code)}. "))
        for code, meaning in documented_codes()
    ]
    tree = [
        (f"`{error.__name__}`", str(int(error.exit_code)), first_sentence(error))
        for error in error_classes(errors.KettleError)
    ]
    lines = [
        NOTICE,
        "# Exit codes",
        "",
        " ".join((exits.ExitCode.__doc__ or "").split()),
        "",
        *table(("Status", "Name", "Meaning"), codes),
        "",
        "## Which error ends with which",
        "",
        *table(("Error", "Status", "Meaning"), tree),
    ]
    return "\n".join(lines) + "\n"


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The dotted path and model of every section, from the outside in."""
    yield path, model
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            assert isinstance(field.annotation, type)
            yield from sections(field.annotation, f"{path}.{name}".lstrip("."))


def is_section(annotation: object) -> bool:
    """Whether a field holds a section and no value."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def documented_codes() -> Iterator[tuple[exits.ExitCode, str]]:
    """Each exit code with the string that stands below it in the source, in which docs live."""
    tree = ast.parse(inspect.getsource(exits))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    for assignment, documentation in pairwise(body):
        if isinstance(assignment, ast.Assign) and isinstance(documentation, ast.Expr):
            (target,) = assignment.targets
            assert isinstance(target, ast.Name)
            yield exits.ExitCode[target.id], " ".join(ast.literal_eval(documentation.value).split())


def error_classes(base: type[errors.KettleError]) -> Iterator[type[errors.KettleError]]:
    """The exception tree, depth first; only what `kettle.errors` itself defines."""
    yield base
    for error in base.__subclasses__():
        if error.__module__ == errors.__name__:
            yield from error_classes(error)


def first_sentence(documented: type) -> str:
    """The first line of a docstring."""
    return (documented.__doc__ or "").strip().splitlines()[0]


def type_words(schema: dict[str, Any]) -> str:
    """A JSON Schema of one value in words that fit a table."""
    if "anyOf" in schema:
        return " or ".join(type_words(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema["type"] == "object":
        return f"table of {type_words(schema['additionalProperties'])}"
    words = "none" if schema["type"] == "null" else str(schema["type"])
    bounds = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in bounds.items() if key in schema]
    if "pattern" in schema:
        limits.append(f"matches `{schema['pattern']}`")
    if "maxLength" in schema:
        limits.append(f"at most {schema['maxLength']} characters")
    return ", ".join([words, *limits])


def default_words(section: type[BaseModel], name: str) -> str:
    """The default of a field as TOML writes it."""
    field = section.model_fields[name]
    if field.is_required():
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]


def as_json(document: dict[str, Any]) -> str:
    """A JSON file that shows small differences in review."""
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write or check all pages; the exit status is 1 if a checked page is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    check = parser.parse_args().check
    stale = [
        name
        for name, text in pages().items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    if check:
        for name in stale:
            print(f"docs/reference/{name} is stale; run: make reference", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(pages()[name], encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
