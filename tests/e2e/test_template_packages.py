"""Packages in a template's build, under the workspace's network policy, from the operator's own mirror."""

from __future__ import annotations

import pytest
from test_network_packages import MIRROR, SOURCES, instance, mirror

from cpuos import CpuosError, Sandbox, Template
from cpuos.testing.sealed import addresses

__all__ = ["instance", "mirror"]

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]
OPTIONS = 'Acquire::Retries "0";\nAcquire::http::Timeout "3";\n'


def test_packages_are_built_in_under_the_workspaces_policy(sealed, instance):
    client = instance.client()
    # apt and pip of the image ask the mirror from here on.
    Template.build(
        "mirrored",
        files={"/etc/apt/apt.conf.d/95test": OPTIONS, "/opt/sources.list": SOURCES + "\n"},
        run=["rm -rf /etc/apt/sources.list*; mv /opt/sources.list /etc/apt/sources.list"],
        client=client,
    )
    sealed.clear()
    Template.build("packaged", from_="mirrored", apt=["tinydeb"], client=client)
    assert {seen.server for seen in sealed.connections() if seen.protocol == "http"} == {addresses.MIRROR}
    client.network.update("off")
    try:
        with Sandbox.create("packaged", client=client) as sandbox:
            assert sandbox.exec("tinydeb").stdout == "hello from a package\n"
        sealed.clear()
        with pytest.raises(CpuosError) as failed:
            Template.build("refused", from_="mirrored", apt=["tinydeb", "hostname"], client=client)
        assert failed.value.details["step"] == "apt"
        assert MIRROR in failed.value.why
        assert sealed.connections() == []
    finally:
        client.network.update("internet")
