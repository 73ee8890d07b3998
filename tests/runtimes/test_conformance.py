"""The conformance suite on each runtime that this machine has."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest

from cpuos import Client
from cpuos.testing.conformance import SandboxConformance
from cpuos.testing.conformance_lifecycle import LifecycleConformance
from cpuos.testing.instance import Instance


@pytest.mark.gvisor
class TestGvisorConformance(SandboxConformance):
    pass


@pytest.mark.gvisor
class TestGvisorLifecycle(LifecycleConformance):
    pass


@pytest.mark.microvm
class TestMicrovmConformance(SandboxConformance):
    """With a kernel of its own for each sandbox, emulated where KVM does not boot."""

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, microvm_instance: Instance) -> Client:
        return microvm_instance.client()


@pytest.mark.microvm
@pytest.mark.slow
class TestMicrovmLifecycle(LifecycleConformance):
    """A machine starts in seconds where it is emulated: what is in the short lane of these is in tests/e2e."""

    own_kernel = True
    packs = False
    known_failures: ClassVar[dict[str, str]] = {
        "test_what_was_never_saved_does_not_come_back": "its root is on a disk, which stays as it was",
    }

    @pytest.fixture
    def host(self, microvm_instance: Instance) -> Instance:
        return microvm_instance

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, microvm_instance: Instance) -> Client:
        return microvm_instance.client()


class TestFakeConformance(SandboxConformance):
    """The fake runs commands as plain processes of this machine: what isolation and users give, it cannot."""

    known_failures = {} if shutil.which("sudo") else {"test_default_user_and_root": "the host has no sudo to lend"}

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, fake_instance: Instance) -> Client:
        return fake_instance.client()


class TestFakeLifecycle(LifecycleConformance):
    """Its processes stand still and go on; they cannot be in two places."""

    packs = False
    known_failures: ClassVar[dict[str, str]] = {
        "test_clones_are_not_each_other": "they share the machine that runs them, and its id"
    }
    impossible: ClassVar[dict[str, str]] = {
        "test_processes_go_on_in_each_clone": "a process of this machine cannot be copied",
        "test_a_time_limit_stands_still_while_it_is_paused": "its agent stands still too, and the clock goes on",
    }

    @pytest.fixture
    def host(self, fake_instance: Instance) -> Instance:
        return fake_instance

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, fake_instance: Instance) -> Client:
        return fake_instance.client()
