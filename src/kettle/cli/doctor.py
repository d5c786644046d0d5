"""`kettle doctor`: whether a run could work here. No torch with --skip-devices."""

# ruff: noqa: PLC0415 - torch takes seconds to import, and only the look at devices needs it

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kettle.cli.config import AsJson
from kettle.cli.launch import Overrides
from kettle.cli.target import is_run_file, refuse_overrides, use_stores
from kettle.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kettle.checkpoint.probe import Finding
    from kettle.config import RunConfig

_LIBRARIES = ("torch", "transformers", "fsspec", "s3fs", "gcsfs")


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="A run file (RUN.toml), or a folder or URI for checkpoints: its store is tried.",
            show_default=False,
        ),
    ] = None,
    *,
    overrides: Overrides = None,
    skip_devices: Annotated[
        bool, typer.Option("--skip-devices", help="Don't look for devices: quick, without torch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check versions, devices and the store of a run, before a run finds out.

    The store is asked, not believed: an object of its own is created below the root, twice, then
    read and deleted. Exits 0 if there is no problem; a warning is none.

    Example: kettle doctor examples/stdlib.toml
    """
    from kettle.cli.render import show_json

    config, uri = _store_of(target, overrides)
    findings = []
    for finding in _look(config, uri, skip_devices=skip_devices):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{finding.state:<7}  {finding.about:<18}  {finding.text}")
    healthy = all(finding.state != "problem" for finding in findings)
    if as_json:
        document: dict[str, Any] = {"healthy": healthy, "store": uri}
        show_json(document | {"findings": [finding.model_dump() for finding in findings]})
    raise typer.Exit(ExitCode.OK if healthy else ExitCode.FAILED)


def _store_of(
    target: str | None, overrides: list[str] | None
) -> "tuple[RunConfig | None, str | None]":
    from kettle.checkpoint.filesystem import absolute
    from kettle.config import load

    if target is not None and is_run_file(target):
        config = load(Path(target), overrides or [])
        return config, absolute(config.checkpoint.root)
    refuse_overrides(target or "no target", overrides)
    return None, None if target is None else absolute(target)


def _look(
    config: "RunConfig | None", uri: str | None, *, skip_devices: bool
) -> "Iterator[Finding]":
    yield from _versions(uri or "")
    if not skip_devices:
        yield _devices(config.runtime.device if config is not None else "auto")
    if uri is not None:
        yield from _store(uri)


def _versions(uri: str) -> "Iterator[Finding]":
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    from kettle.checkpoint.probe import Finding

    own = importlib.metadata.metadata("kettle")
    found, wanted = platform.python_version(), SpecifierSet(own["Requires-Python"] or "")
    yield _version("python", found, wanted)
    stated = map(Requirement, importlib.metadata.requires("kettle") or [])
    specifiers = {requirement.name: requirement.specifier for requirement in stated}
    for library in _LIBRARIES:
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            scheme, extra = ("s3://", "s3") if library == "s3fs" else ("gs://", "gcs")
            yield Finding(
                about=library,
                state="problem" if uri.startswith(scheme) else "ok",
                text=f"not installed; {scheme} needs it: install kettle[{extra}]",
            )
            continue
        yield _version(library, found, specifiers[library])


def _version(name: str, found: str, wanted: Any) -> "Finding":
    from kettle.checkpoint.probe import Finding

    if wanted.contains(found, prereleases=True):
        return Finding(about=name, state="ok", text=found)
    return Finding(
        about=name, state="problem", text=f"{found}, and kettle needs {wanted}; install such a one"
    )


def _devices(wanted: Literal["auto", "cpu", "cuda"]) -> "Finding":
    import torch

    from kettle.checkpoint.probe import Finding

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        return Finding(about="devices", state="ok", text=f"{len(names)} CUDA: {', '.join(names)}")
    if wanted == "cuda":
        text = 'no CUDA device, and the run file says runtime.device = "cuda"; set it to "auto"'
        return Finding(about="devices", state="problem", text=text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(about="devices", state="ok", text=f"no CUDA device; {cores} CPU cores")


def _store(uri: str) -> "Iterator[Finding]":
    from kettle.checkpoint.filesystem import open_store
    from kettle.checkpoint.probe import Finding, probe_store
    from kettle.errors import CheckpointError

    use_stores(uri, patience_s=40.0)
    try:
        filesystem, root = open_store(uri)
    except CheckpointError as error:
        yield Finding(about="store", state="problem", text=str(error))
        return
    if uri.startswith("memory:"):
        text = f"{uri} is gone when a process ends; name a folder, or a URI of a store that lasts"
        yield Finding(about="store", state="problem", text=text)
        return
    yield from probe_store(filesystem, root, uri=uri)
