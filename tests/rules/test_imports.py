"""Who may import whom. Read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "cpuos"

# For each part: what it may import at any place, beside itself. "cpuos" is the public face, cpuos/__init__.py.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "plugins": {"errors"},
    "places": set(),
    "preview_domain": set(),
    "key_file": set(),
    "settings": {"errors", "key_file", "places", "preview_domain"},
    "answers": {"errors"},
    "bounded": set(),
    "durable": set(),
    "logstream": set(),
    "live": set(),
    "json_lines": set(),
    "client": {"errors", "key_file", "types"},
    "runtimes": {"errors", "types", "plugins", "settings"},
    "node": {"answers", "durable", "errors", "types", "plugins", "settings", "logstream", "runtimes"},
    "gateway": {"errors", "types", "settings", "bounded", "logstream", "node.client"},
    "scheduler": {"errors", "types", "plugins", "settings", "node.client"},
    "server": {
        "answers",
        "durable",
        "errors",
        "types",
        "plugins",
        "settings",
        "bounded",
        "json_lines",
        "logstream",
        "scheduler",
        "node.client",
    },
    "profiles": {"cpuos", "errors", "types"},
    "setup": {"cpuos", "durable", "errors", "key_file", "live", "types", "plugins", "settings"},
    "services": {"errors", "key_file", "types", "settings", "setup"},
    "cli": {"cpuos", "errors", "json_lines", "key_file", "live", "types", "client"},
}
# Only inside functions: the light client and CLI load without them.
ALLOWED_INSIDE: dict[str, set[str]] = {
    "cli": {"setup", "services", "settings", "profiles"},
    "setup": {"services", "runtimes", "node.client", "node.network"},
    "services": {"node.client", "node.network", "runtimes"},
}
# errors and types stand below everything, so they stay importable with pydantic alone.
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "types": {"pydantic"},
    "client": {"pydantic", "pydantic_core", "httpx2", "httpcore2", "anyio", "websockets", "typing_extensions"},
    "cli": {"typer", "rich"},
    "live": {"rich"},
    "profiles": {"pydantic"},
}


class Import(NamedTuple):
    file: str
    line: int
    module: str
    inside: bool


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    shown = str(path.relative_to(SOURCE))
    package = list(path.relative_to(SOURCE).with_suffix("").parts[:-1])

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(shown, child.lineno, alias.name, inside)
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(package[: len(package) - child.level + 1]) + "." if child.level else ""
                module = f"{base}{child.module or ''}".strip(".")
                for alias in child.names:
                    full = f"{module}.{alias.name}"
                    is_module = (SOURCE / full.replace(".", "/")).with_suffix(".py").exists() or (
                        SOURCE / full.replace(".", "/")
                    ).is_dir()
                    yield Import(shown, child.lineno, full if is_module else module, inside)
            deeper = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
            yield from walk(child, inside or deeper)

    yield from walk(tree, False)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _own(module: str) -> str | None:
    """The part of ours that a module belongs to; None for others' modules."""
    if module == "cpuos":
        return "cpuos"
    return module.removeprefix("cpuos.") if module.startswith("cpuos.") else None


def _is_allowed(wanted: str, part: str, allowed: set[str]) -> bool:
    return any(wanted == name or wanted.startswith(f"{name}.") for name in (part, *allowed))


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


@pytest.mark.parametrize("part", sorted({_part(path) for path in FILES}))
def test_parts_import_only_what_lies_below_them(part: str) -> None:
    if part == "testing":
        return
    assert part in ALLOWED, f"src/cpuos/{part} is a new part: give it a row in {__file__}"
    wrong = []
    for path in FILES:
        if _part(path) != part:
            continue
        for found in _imports(path):
            wanted = _own(found.module)
            if wanted is None:
                continue
            allowed = ALLOWED[part] | (ALLOWED_INSIDE.get(part, set()) if found.inside else set())
            if not _is_allowed(wanted, part, allowed):
                wrong.append(f"{found.file}:{found.line}: {found.module}")
    assert not wrong, f"{part} may import {sorted(ALLOWED[part])}, but:\n" + "\n".join(wrong)


@pytest.mark.parametrize("part", sorted(THIRD_PARTY))
def test_light_parts_stay_light(part: str) -> None:
    import sys

    wrong = [
        f"{found.file}:{found.line}: {found.module}"
        for path in FILES
        if _part(path) == part
        for found in _imports(path)
        if (top := found.module.split(".")[0]) != "cpuos"
        and top not in sys.stdlib_module_names
        and top not in THIRD_PARTY[part]
    ]
    assert not wrong, f"{part} may use {sorted(THIRD_PARTY[part])}, but:\n" + "\n".join(wrong)


def test_nothing_imports_cli_or_testing() -> None:
    wrong = [
        f"{found.file}:{found.line}: {found.module}"
        for path in FILES
        for found in _imports(path)
        if (_own(found.module) or "").split(".")[0] in ("cli", "testing")
        and (_own(found.module) or "").split(".")[0] != _part(path)
        and _part(path) != "testing"
    ]
    assert not wrong, "\n".join(wrong)
