"""cpuOS as an operator installs it: systemd's units, control groups v2, `/run` with the flags that systemd gives it.

One machine a distribution is booted, and what was tried there are the tests: `guest_checks.py`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator

import pytest

from cpuos.settings import load_settings
from machine.distribution import BOOKWORM, NOBLE, TRIXIE
from machine.whole_machine import boot, build_disk, check_names, what_is_lacking

CHECKS = "guest_checks.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine is one of x86-64"),
]


@pytest.fixture(scope="module", params=[BOOKWORM, NOBLE, TRIXIE], ids=lambda release: release.name)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    settings, release = load_settings(), request.param
    if lacking := what_is_lacking(settings, release):
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp(release.name)
    build_disk(settings, release, folder, checks=CHECKS)
    yield boot(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_on_a_whole_machine(found: dict[str, str], check: str) -> None:
    assert found[check] == ""
