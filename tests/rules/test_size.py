"""Length of files and functions: past these lines a noun wants its own file, a step its own name."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_AGENT_CODE_LINES = 2500
"""Of the guest agent, without comments, blank lines and its parts that have a budget of their own."""
AGENT_PARTS = {
    "freeze.go": 390,  # a sandbox stands still, and goes on whole, or as a copy
    "limits.go": 104,  # limits that a guest kernel keeps, and what it counts of them
    "machine.go": 244,  # what a guest kernel leaves to its first process, also when the machine is saved
    "tunnel.go": 90,  # connections to servers inside
}


def _sources() -> list[Path]:
    paths = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "scripts").rglob("*.py"))
    return [path for path in paths if "generated" not in path.read_text()[:200].lower()]


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in _sources() if (lines := _lines(path)) > MAX_FILE_LINES}
    assert not long, f"split by noun: {long}"


def test_functions_stay_readable() -> None:
    long = {}
    for path in _sources():
        if "migrations" in path.parts:  # a table in words, one line a column
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # The body, without signature and docstring: a signature with one line an option is a table.
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert not long, f"give the steps names: {long}"


def test_the_agent_stays_lean() -> None:
    paths = [path for path in (ROOT / "guest").rglob("*.go") if not path.name.endswith("_test.go")]
    sizes = {path.name: _code_lines(path) for path in paths}
    parts = {name: sizes.pop(name) for name in AGENT_PARTS}
    assert {name: size for name, size in parts.items() if size > AGENT_PARTS[name]} == {}
    assert sum(sizes.values()) <= MAX_AGENT_CODE_LINES


def _code_lines(path: Path) -> int:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(bool(line) and not line.startswith("//") for line in lines)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
