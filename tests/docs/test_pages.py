"""Pages that speak of code stay true to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cpuos.errors import ERRORS
from cpuos.types.command import CommandStatus

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_PATH = re.compile(r"`((?:src|guest|api|tests|scripts)/[A-Za-z0-9_./-]+)`")


def test_architecture_names_the_files_of_the_flow() -> None:
    page = (DOCS / "explanation" / "architecture.md").read_text()
    section = page.split("## Read it from SDK to guest")[1].split("##")[0]
    files = re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)
    assert 5 <= len(files) <= 11
    assert files[0].startswith("src/cpuos/client/")
    assert files[-1].startswith("guest/")
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_paths_in_the_docs_exist() -> None:
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
        for name in _PATH.findall(page.read_text())
        if not (ROOT / name).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_owners_in_the_architecture_exist() -> None:
    page = (DOCS / "explanation" / "architecture.md").read_text()
    table = page.split("## Who owns which decision")[1].split("\nWho may")[0]
    owners = re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(owners) > 8
    wrong = [name for name in owners if not (ROOT / name).exists() and not (ROOT / "src" / "cpuos" / name).exists()]
    assert not wrong


def test_every_end_of_a_command_is_explained() -> None:
    page = (DOCS / "explanation" / "results-and-limits.md").read_text()
    missing = [status for status in CommandStatus if status.ended and f"| `{status}` |" not in page]
    assert not missing


def test_every_error_has_its_heading() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    missing = [code for code in ERRORS if code not in page]
    assert not missing


def test_command_line_page_is_generated() -> None:
    done = subprocess.run([sys.executable, "scripts/gen_cli.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sdk_page_is_generated() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen.py", "--check", "sdk"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (DOCS / "reference" / "sdk.md").read_text()
    for name in ("PIPE", "Sandbox.connect", "Sandbox.list", "### set_timeout", "### watch", "### pty", "## Errors"):
        assert name in page, name


def test_records_of_decisions_are_numbered_and_have_their_parts() -> None:
    pages = sorted((DOCS / "adr").glob("*.md"))
    assert pages
    numbers = [page.name[:4] for page in pages]
    assert len(numbers) == len(set(numbers)), numbers
    for page in pages:
        text = page.read_text()
        assert text.startswith("# "), page.name
        for part in ("Context", "Decision", "Consequences"):
            assert part in text, f"{page.name} has no {part}"
