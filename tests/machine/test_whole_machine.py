"""cpuOS as an operator installs it: systemd's units, control groups v2, `/run` with the flags that systemd gives it.

One machine is booted, and what was tried there are the tests: `guest_checks.py`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos.settings import load_settings
from cpuos.setup.source import environment_path
from machine.whole_machine import boot, build_disk, missing_programs

CHECKS = re.findall(r"^def (test_\w+)", Path(__file__).with_name("guest_checks.py").read_text(), re.MULTILINE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine is one of x86-64"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    settings = load_settings()
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}")
    if settings.data_dir != Path("/var/lib/cpuos") or not (settings.template_dir / "base").is_dir():
        pytest.skip("set-up has not installed cpuOS at its usual place here")
    if (settings.venv_dir / "current").resolve() != environment_path(settings):
        pytest.skip("what set-up has installed is not this source: make setup-tests")
    folder = tmp_path_factory.mktemp("machine")
    build_disk(settings, folder)
    yield boot(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_whole_machine(found: dict[str, str], check: str) -> None:
    assert found[check] == ""
