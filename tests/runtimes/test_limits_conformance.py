"""What the limits of a sandbox do, on each runtime that isolates."""

from __future__ import annotations

import pytest

from cpuos import Client
from cpuos.testing.conformance_limits import LimitsConformance
from cpuos.testing.instance import Instance


@pytest.mark.gvisor
@pytest.mark.timeout(300)
class TestGvisorLimits(LimitsConformance):
    pass


@pytest.mark.microvm
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestMicrovmLimits(LimitsConformance):
    """A machine starts in seconds where it is emulated: what is in the short lane of these is in tests/e2e."""

    limit_s = 300
    seen_by = "guest"

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, microvm_instance: Instance) -> Client:
        return microvm_instance.client()
