"""MicroVMs by KVM, where the machine that the tests run on has none: in a machine whose processor QEMU translates, SVM
and all. `make test-nested`; one machine is booted, and what was tried there are the tests: `nested_checks.py`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos.settings import Settings, load_settings
from machine.distribution import BOOKWORM
from machine.whole_machine import COUNTED, boot, build_disk, check_names, what_is_lacking

CHECKS = "nested_checks.py"
BOOT_S = 2 * 3600
FIRECRACKER_S = 6 * 3600
SKIPPED = "skipped: "
# No guest but those that a check asks for: each takes the one processor for minutes.
CONFIG = "pool_memory_mib = 0\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(FIRECRACKER_S + 600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine is one of x86-64"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    settings = load_settings()
    if lacking := what_is_lacking(settings, BOOKWORM):
        pytest.skip(lacking)
    if not (settings.microvm_dir / "manifest.json").is_file():
        pytest.skip("set-up has made no image for microVMs: make setup-tests")
    folder = tmp_path_factory.mktemp("nested")
    build_disk(settings, BOOKWORM, folder, checks=CHECKS, config=CONFIG, copied=copied(settings))
    yield boot(folder, machine=COUNTED, limit_s=FIRECRACKER_S if settings.vmm_programs else BOOT_S)
    shutil.rmtree(folder)


def copied(settings: Settings) -> dict[Path, str]:
    """What guests start from, without what was found of it here; and Firecracker's programs, where they are named."""
    names = ("vmlinux", "initrd", "manifest.json")
    image = {settings.microvm_dir / name: f"/var/lib/cpuos/microvm/{name}" for name in names}
    return image | {program.resolve(): f"/opt/firecracker/{name}" for name, program in settings.vmm_programs.items()}


@pytest.mark.parametrize("check", check_names(CHECKS))
def test_in_a_machine_with_svm(found: dict[str, str], check: str) -> None:
    why = found[check]
    if why.startswith(SKIPPED):
        pytest.skip(why.removeprefix(SKIPPED))
    assert why == ""
