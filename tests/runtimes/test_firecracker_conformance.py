"""The conformance suite in Firecracker: `make test-firecracker`.

Where its programs are not known, or no guest answers from it, each test is skipped with what the probe saw.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos import Client, Sandbox
from cpuos.runtimes.microvm.probe import Prober, candidates
from cpuos.settings import load_settings
from cpuos.testing.conformance import SandboxConformance
from cpuos.testing.conformance_lifecycle import LifecycleConformance
from cpuos.testing.fixtures import MAX_MICROVMS
from cpuos.testing.instance import Instance


@pytest.fixture(scope="module")
def firecracker_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    reason = why_not(tmp_path_factory.mktemp("probe"))
    if reason:
        pytest.skip(reason)
    with Instance(runtime="microvm", max_sandboxes=MAX_MICROVMS) as instance:
        yield instance


def why_not(folder: Path) -> str:
    """Empty where a guest has answered from Firecracker."""
    settings = load_settings()
    if not settings.vmm_programs:
        return "CPUOS_FIRECRACKER and CPUOS_JAILER are not set, and set-up has installed neither"
    if os.geteuid() != 0:
        return "only root can boot a machine"
    vmms = [vmm for vmm in candidates(settings.vmm_programs) if vmm.name == "firecracker"]
    if not vmms:
        return "there is no /dev/kvm"
    prober = Prober(settings.microvm_dir, kept=folder / "kept.json", folder=folder / "work", vmms=vmms, fresh=True)
    found = asyncio.run(prober.probe())
    return "" if found.available else found.reason


class TestFirecrackerConformance(SandboxConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, firecracker_instance: Instance) -> Client:
        return firecracker_instance.client()

    def test_it_is_what_it_says(self, client: Client) -> None:
        with Sandbox.create(template="base", client=client) as sandbox:
            assert sandbox.isolation == "microvm"
            assert sandbox.isolation_detail.startswith("firecracker ")


class TestFirecrackerLifecycle(LifecycleConformance):
    packs = False

    @pytest.fixture
    def host(self, firecracker_instance: Instance) -> Instance:
        return firecracker_instance

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, firecracker_instance: Instance) -> Client:
        return firecracker_instance.client()
