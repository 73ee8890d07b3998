"""Every code block of the docs is real: it compiles, and it runs against a real instance where there is one.

The blocks of a page run in their order, in one folder; Python blocks of a page share their names, each shell block is a
script of its own. A block that cannot run here says so on the line before: <!-- not run: reason -->.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<skip><!-- not run: [^\n]+ -->\n)?```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
LANGUAGES = {"python", "sh", "text", "json", "toml"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    runs: bool


def _blocks(page: Path) -> list[Block]:
    source = page.read_text()
    blocks = []
    for match in _FENCE.finditer(source):
        line = source.count("\n", 0, match.start("text"))
        blocks.append(Block(page, line, match["language"], match["text"], match["skip"] is None))
    return blocks


BLOCKS = [block for page in PAGES for block in _blocks(page)]
RUNNABLE = [page for page in PAGES if any(block.runs and block.language in ("python", "sh") for block in _blocks(page))]


def _show(value: Block | Path) -> str:
    if isinstance(value, Block):
        return f"{value.page.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT))


@pytest.mark.parametrize("block", BLOCKS, ids=_show)
def test_block_names_its_language(block: Block) -> None:
    assert block.language in LANGUAGES


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=_show)
def test_python_block_compiles(block: Block) -> None:
    compile(block.text, _show(block), "exec")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=_show)
def test_shell_block_is_shell(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, capture_output=True)


@pytest.mark.gvisor
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUNNABLE, ids=_show)
def test_page_runs(page: Path, instance: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in _blocks(page):
            if not block.runs:
                continue
            if block.language == "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            elif block.language == "sh":
                _run_shell(block)
    finally:
        _end_as_a_program_does(names)


def _end_as_a_program_does(names: dict[str, object]) -> None:
    """Let go of what a page left open: its reader's program ends here, and what it held with it."""
    names.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _run_shell(block: Block) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, f"{_show(block)}\n{done.stdout}\n{done.stderr}"
