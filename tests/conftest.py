"""Fixtures of a private instance: real sandboxes where the machine can, the fake runtime elsewhere."""

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell starts background work with SIGINT ignored, and that is inherited: tests of Ctrl-C mean the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test changes the network of the machine that runs it; those that need an uplink have a sealed world for it.
os.environ.setdefault("CPUOS_NETWORK_UPLINK", "none")

# A machine that stands still for a second says nothing about what is tested.
settings.register_profile("cpuos", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cpuos")

pytest_plugins = ["cpuos.testing.fixtures"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: who runs what."""
    from lanes import LaneScheduling

    return LaneScheduling(config, log)
