"""What every file of the repository keeps to."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _tracked(*patterns: str) -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_licence_is_the_one_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:500]
    assert "Apache-2.0" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"])
def test_front_pages_exist(name: str) -> None:
    assert (ROOT / name).stat().st_size > 300


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_changelog_has_a_place_for_what_is_new() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_no_large_or_built_files() -> None:
    large = [str(path.relative_to(ROOT)) for path in _tracked() if path.stat().st_size > 1 << 20]
    built = [str(path.relative_to(ROOT)) for path in _tracked("*.pyc", "*.so", "*.erofs", "*.whl", "*.log")]
    assert not large + built


def test_exception_history_words_stay_out_of_comments() -> None:
    """A comment says why the code is as it is; what it was is in the history."""
    words = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked("src/*.py", "guest/*.go", "scripts/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_waits_by_select() -> None:
    """A daemon with many sandboxes has descriptors that select() does not take. The command line has few."""
    calls = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked("src/cpuos/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "select.select(" in line and "cli" not in path.parts
    ]
    assert not calls, "\n".join(calls)
