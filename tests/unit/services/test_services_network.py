"""What an instance's network adds to the host goes with the instance, whoever is left to take it away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from cpuos.node.network.hub import Hub
from cpuos.node.network.plan import BlockPlan, host_link, host_table
from cpuos.services.control import down
from cpuos.services.removal import uninstall
from cpuos.settings import Settings, load_settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
_PLAN = BlockPlan(network=IPv4Network("10.99.0.0/24"))
_LISTINGS = ("ip -o link", "ip -o addr", "ip rule", "ip route show table all", "nft list ruleset")


@pytest.fixture
def settings(sealed, tmp_path: Path) -> Iterator[Settings]:
    """Of an instance whose node was killed: its hub, link and table are there."""
    made = load_settings(data_dir=tmp_path / "data", state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    hub = Hub(made.run_dir / "netns", instance_id=made.instance_id, uplink="nat")
    sealed.in_host(lambda: hub.open(_PLAN))
    yield made
    sealed.in_host(hub.remove)


def network_of(sealed, settings: Settings) -> tuple[bool, bool, bool]:
    link = host_link(settings.instance_id) in sealed.run_in_host(["ip", "-br", "link"]).stdout
    route = "10.99.0.0" in sealed.run_in_host(["ip", "route", "show", "table", "all"]).stdout
    table = host_table(settings.instance_id) in sealed.run_in_host(["nft", "list", "tables"]).stdout
    return link, route, table


def test_uninstall_removes_link_route_and_table(sealed, settings):
    assert network_of(sealed, settings) == (True, True, True)
    removed = sealed.in_host(lambda: uninstall(settings, uid=0)).removed
    assert network_of(sealed, settings) == (False, False, False)
    assert not settings.run_dir.exists()
    assert f"mount {settings.run_dir}/netns/hub" in removed


def test_down_leaves_nothing_on_the_host_unless_sandboxes_stay(sealed, settings):
    sealed.in_host(lambda: down(settings, keep_sandboxes=True, uid=0))
    assert network_of(sealed, settings) == (True, True, True)
    sealed.in_host(lambda: down(settings, uid=0))
    assert network_of(sealed, settings) == (False, False, False)


@pytest.mark.parametrize("keep", [False, True])
def test_of_an_uplink_in_user_space_nothing_is_ever_there(sealed, tmp_path, keep):
    made = load_settings(data_dir=tmp_path / "data", state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    hub, plan = Hub(made.run_dir / "netns", instance_id=made.instance_id, uplink="user"), _PLAN
    before = [sealed.run_in_host(words.split()).stdout for words in _LISTINGS]
    sealed.in_host(lambda: hub.open(plan))
    device, listener = sealed.in_host(lambda: hub.open_user_uplink(plan))
    try:
        assert [sealed.run_in_host(words.split()).stdout for words in _LISTINGS] == before
    finally:
        os.close(device)
        listener.close()
    sealed.in_host(lambda: down(made, keep_sandboxes=keep, uid=0))
    removed = sealed.in_host(lambda: uninstall(made, uid=0)).removed
    assert [sealed.run_in_host(words.split()).stdout for words in _LISTINGS] == before
    assert not made.run_dir.exists()
    assert f"mount {made.run_dir}/netns/hub" in removed or not keep


def test_from_nat_to_user_space_and_back(sealed, settings):
    folder = settings.run_dir / "netns"
    user = Hub(folder, instance_id=settings.instance_id, uplink="user")
    sealed.in_host(lambda: user.open(_PLAN))
    assert network_of(sealed, settings) == (False, False, False)
    device, listener = sealed.in_host(lambda: user.open_user_uplink(_PLAN))
    listener.close()
    sealed.in_host(lambda: Hub(folder, instance_id=settings.instance_id, uplink="nat").open(_PLAN))
    assert network_of(sealed, settings) == (True, True, True)
    os.close(device)
    sealed.in_host(lambda: Hub(folder, instance_id=settings.instance_id, uplink="none").open(_PLAN))
    assert network_of(sealed, settings) == (False, False, False)
