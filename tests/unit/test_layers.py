import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "torchdata", "numpy", "matplotlib"}


def contracts() -> list[dict[str, list[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, list[str]]] = settings["tool"]["importlinter"]["contracts"]
    return found


def torch_free_modules() -> list[str]:
    (contract,) = (c for c in contracts() if "torch" in c.get("forbidden_modules", []))
    return [*contract["source_modules"], "kettle.cli.app", "kettle.signals"]


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_no_module_imports_from_a_layer_above_it() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", torch_free_modules())
def test_fresh_interpreter_that_imports_it_has_no_torch(module: str) -> None:
    assert not HEAVY & imported_by(f"import {module}")


def test_torch_would_be_noticed() -> None:
    assert imported_by("import numpy") & HEAVY == {"numpy"}


def test_every_module_has_its_place_in_the_layers() -> None:
    (layers,) = (c["layers"] for c in contracts() if c.get("layers"))
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    package = ROOT / "src" / "kettle"
    modules = {f"kettle.{path.stem}" for path in package.glob("*.py")} - {"kettle.__init__"}
    packages = {f"kettle.{path.parent.name}" for path in package.glob("*/__init__.py")}
    assert modules | packages == placed


def test_package_init_files_are_empty() -> None:
    full = [path for path in (ROOT / "src").rglob("__init__.py") if path.stat().st_size]
    assert full == []
