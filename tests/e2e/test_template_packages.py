"""Packages in a template's build, under the workspace's network policy, from the operator's own mirror."""

from __future__ import annotations

import pytest
from test_network_packages import MIRROR, SOURCES, instance, mirror

from cpuos import CpuosError, Sandbox, Template
from cpuos.testing.sealed import addresses

__all__ = ["instance", "mirror"]

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]
OPTIONS = 'Acquire::Retries "0";\nAcquire::http::Timeout "3";\n'


PIP_CONF = f"[global]\nindex-url = http://{MIRROR}:8080/simple/\ntrusted-host = {MIRROR}\nretries = 0\ntimeout = 3\n"
SAID = "python3 -c 'import tinypackage; print(tinypackage.WORD)'; false"


def test_a_python_package_is_built_in_from_the_mirror(sealed, instance):
    """The last step fails so that no image has to be made of it: what it says is what the image would hold."""
    client = instance.client()
    told: list[str] = []
    recipe = {"from_": "python", "files": {"/etc/pip.conf": PIP_CONF}, "pip": ["tinypackage==1.0"]}
    sealed.clear()
    with pytest.raises(CpuosError) as failed:
        Template.build("wheeled", **recipe, run=[SAID], on_output=told.append, client=client)
    assert failed.value.details["step"] == "run 1"
    assert told[-1] == "hello from a wheel"
    assert {seen.server for seen in sealed.connections() if seen.protocol == "http"} == {addresses.MIRROR}
    # The step is not done again, nor is the mirror asked.
    sealed.clear()
    told.clear()
    with pytest.raises(CpuosError):
        Template.build("wheeled", **recipe, run=[f"true; {SAID}"], on_output=told.append, client=client)
    assert [line for line in told if line.endswith("(done before)")][-1].startswith("== pip: ")
    assert (told[-1], sealed.connections()) == ("hello from a wheel", [])
    with pytest.raises(CpuosError) as failed:
        Template.build("wheeled", **{**recipe, "pip": ["tinypackage==2.0"]}, client=client)
    assert failed.value.details["step"] == "pip"
    assert "tinypackage==2.0" in str(failed.value)


def test_a_wheel_of_the_caller_is_built_in_without_a_network(mirror, instance):
    client = instance.client()
    wheels = mirror / "simple" / "tinypackage"
    told: list[str] = []
    client.network.update("off")
    try:
        with pytest.raises(CpuosError) as failed:
            Template.build(
                "wheeled",
                from_="python",
                files={"/opt/wheels": wheels},
                env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/opt/wheels"},
                pip=["tinypackage"],
                run=[SAID],
                on_output=told.append,
                client=client,
            )
    finally:
        client.network.update("internet")
    assert failed.value.details["step"] == "run 1"
    assert told[-1] == "hello from a wheel"


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
