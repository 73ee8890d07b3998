"""Names: what a module offers is in its sorted `__all__`, the rest begins with an underscore; no drawers."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "cpuos"
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "core", "base_classes", "manager"}
# Alembic loads revisions by path and by its own names.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts and path.name != "__main__.py")


def _show(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", FILES, ids=_show)
def test_public_names_are_declared(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    declared = _declared(tree)
    if declared is None:
        assert not defined, f"{_show(path)} has public names and no __all__: {sorted(defined)}"
        return
    # A dunder name may be listed: cpuos.__version__.
    assert not [name for name in declared if name.startswith("_") and not name.startswith("__")]
    missing = defined - set(declared)
    assert not missing, f"{_show(path)}: add to __all__ or begin with an underscore: {sorted(missing)}"
    assert len(declared) == len(set(declared)), f"{_show(path)}: a name is twice in __all__"


@pytest.mark.parametrize(
    "part", ["errors", "types.command", "types.files", "types.frames", "types.sandbox", "types.units"]
)
def test_declared_names_exist(part: str) -> None:
    module = importlib.import_module(f"cpuos.{part}")
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_public_face_keeps_its_word() -> None:
    import cpuos

    for name in cpuos.__all__:
        assert getattr(cpuos, name) is not None


def test_no_drawers() -> None:
    wrong = [_show(path) for path in PACKAGE.rglob("*") if path.stem.strip("_") in DRAWERS]
    assert not wrong, f"a module is named after what it is about: {wrong}"
