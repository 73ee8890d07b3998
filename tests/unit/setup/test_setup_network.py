"""What doctor says of the host's network, looked at inside a sealed one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cpuos.node.network.plan import host_link
from cpuos.settings import Settings, load_settings
from cpuos.setup.checks import Check, CheckState
from cpuos.setup.host import Host
from cpuos.setup.network import look_at_network

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def settings(folder: Path, **values) -> Settings:
    return load_settings(data_dir=folder, state_dir=folder / "s", **{"network_uplink": "nat", **values})


def look(sealed, settings: Settings) -> dict[str, Check]:
    with open(os.devnull, "w") as log:
        host = Host(settings, log=log)
        return {check.name: check for check in sealed.in_host(lambda: list(look_at_network(host)))}


def test_a_plain_host_is_in_place(sealed, tmp_path):
    checks = look(sealed, settings(tmp_path))
    assert {check.state for check in checks.values()} == {CheckState.OK}, checks
    assert "10.231" in checks["network block"].evidence
    assert "none" in checks["network exceptions"].evidence


def test_exceptions_are_shown_and_wrong_ones_told(sealed, tmp_path):
    checks = look(sealed, settings(tmp_path, network_exceptions=["mirror.example=10.77.0.5:443"]))
    assert checks["network exceptions"].evidence == "mirror.example=10.77.0.5:443"
    checks = look(sealed, settings(tmp_path, network_exceptions=["10.77.0.5:443"]))
    assert checks["network exceptions"].state is CheckState.MISSING
    assert "NAME=ADDRESS:PORT" in checks["network exceptions"].evidence


def test_a_block_that_clashes_is_told(sealed, tmp_path):
    check = look(sealed, settings(tmp_path, network_block="80.90.96.0/20"))["network block"]
    assert check.state is CheckState.MISSING
    assert "the route over eth0" in check.evidence
    assert check.fix


def test_without_an_uplink_less_is_needed(sealed, tmp_path):
    checks = look(sealed, settings(tmp_path, network_uplink="none"))
    assert "forward chains" not in checks
    assert checks["network uplink"].state is CheckState.OK


DOCKERS = """
table ip filter {
  chain DOCKER { }
  chain FORWARD { type filter hook forward priority filter; policy drop; jump DOCKER; }
}
"""


def test_a_forward_policy_of_drop_is_found_and_its_cure_works(sealed, tmp_path):
    """As Docker leaves it behind: the sealed hub stands for an instance, and its link is what the cure names."""
    instance = settings(tmp_path)
    link, own = host_link(instance.instance_id), sealed.hub._instance_id
    with sealed.slot() as slot:
        assert slot.connect("93.184.215.14", 80) == "connected"
        sealed.run_in_host(["nft", "-f", "-"], input=DOCKERS, timeout=10)
        try:
            assert slot.connect("93.184.215.14", 80, timeout_s=0.4) == "TimeoutError"
            check = look(sealed, instance)["forward chains"]
            assert check.state is CheckState.WARNING
            assert "ip filter FORWARD" in check.evidence
            for command in check.fix.split("; "):
                for name in (link, host_link(own)):
                    done = sealed.run_in_host(["sh", "-c", command.replace(link, name)])
                    assert done.returncode == 0, done.stderr
            assert look(sealed, instance)["forward chains"].state is CheckState.OK
            assert slot.connect("93.184.215.14", 80) == "connected"
        finally:
            subprocess.run(["nsenter", f"--net={sealed.host}", "nft", "delete table ip filter"], check=True)


def test_an_uplink_in_user_space_says_what_it_is_and_costs(sealed, tmp_path, monkeypatch):
    checks = look(sealed, settings(tmp_path, network_uplink="user"))
    assert checks["network uplink"].state is CheckState.OK
    assert "nothing of this host is changed" in checks["network uplink"].evidence
    assert "one process" in checks["network uplink"].evidence
    assert not {"forwarding", "forward chains"} & checks.keys(), "it needs neither"
    monkeypatch.setattr("cpuos.setup.network._TUN", str(tmp_path / "none"))
    check = look(sealed, settings(tmp_path, network_uplink="user"))["network uplink"]
    assert (check.state, check.fix) == (CheckState.MISSING, "sudo modprobe tun")
