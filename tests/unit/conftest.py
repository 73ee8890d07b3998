"""Unit tests of the network get a sealed world with nothing in it: that of the session may have an instance, with a hub
of its own on the same host."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cpuos.testing.sealed import SealedWorld


@pytest.fixture(scope="module")
def sealed() -> Iterator[SealedWorld]:
    if os.geteuid() != 0:
        pytest.skip("a sealed network world needs root")
    with SealedWorld() as world:
        yield world
