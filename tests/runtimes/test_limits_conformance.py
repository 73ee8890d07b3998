"""What the limits of a sandbox do, on each runtime that isolates."""

from __future__ import annotations

import pytest

from cpuos.testing.conformance_limits import LimitsConformance


@pytest.mark.gvisor
@pytest.mark.timeout(300)
class TestGvisorLimits(LimitsConformance):
    pass
