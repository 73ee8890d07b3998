"""What an operator lets one sandbox take of the network, on real sandboxes in a sealed world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import IPv4Network

import pytest

from cpuos import Sandbox
from cpuos.errors import InvalidRequest
from cpuos.node.network.limits import NetworkLimits
from cpuos.node.network.maker import SlotRecipe
from cpuos.settings import Settings, load_settings
from cpuos.testing.sealed import SealedWorld, addresses

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

CONNECTIONS = """
import json, socket
def begin():
    try:
        return socket.create_connection(("{address}", 80), 20)
    except OSError as error:
        return type(error).__name__
held = [begin() for _ in range({count})]
failed = [one for one in held if isinstance(one, str)]
print(json.dumps([len(held) - len(failed), sorted(set(failed))]))
raise SystemExit(1)
"""
NAMES = r"""
import socket
flood = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
flood.connect(("10.0.0.1", 53))
for number in range(400):
    flood.send(number.to_bytes(2, "big") + bytes.fromhex("01000001000000000000") + b"\1a\7example\0\0\1\0\1")
flood.settimeout(1)
answers = 0
try:
    while True:
        flood.recv(512)
        answers += 1
except TimeoutError:
    print(answers)
"""
BYTES = """
import socket, time
made = socket.create_connection(("{address}", 5000))
made.settimeout(0.2)
began, sent = time.monotonic(), 0
while time.monotonic() - began < 3:
    try:
        sent += made.send(bytes(65536))
        made.recv(65536)
    except TimeoutError:
        pass
print(sent / (time.monotonic() - began) / (1 << 20))
"""


@pytest.fixture(scope="module")
def limited(sealed: SealedWorld) -> Iterator[Sandbox]:
    sealed.names.set("a.example", [addresses.WEB])
    limits = {"network_connections": 24, "network_names_per_s": 8, "network_mib_per_s": 1}
    with (
        sealed.instance(runtime="gvisor", max_sandboxes=2, network_pool=1, **limits) as instance,
        Sandbox.create(client=instance.client(), template="python") as sandbox,
    ):
        yield sandbox


def test_connections_over_the_limit_are_refused_and_told(limited):
    result = limited.exec(["python3", "-c", CONNECTIONS.format(address=addresses.WEB, count=40)])
    opened, failed = json.loads(result.stdout)
    assert opened in (24, 25)
    assert failed == ["ConnectionRefusedError"]
    assert {one.rule for one in result.refused_connections} == {"limit: too many connections"}
    assert sum(one.count for one in result.refused_connections) == 40 - opened


def test_questions_over_the_limit_are_not_answered(limited):
    answers = int(limited.exec(["python3", "-c", NAMES], check=True).stdout)
    assert 1 <= answers <= 40, "some of 400 at once"


def test_a_sandbox_sends_no_faster_than_it_may(limited):
    sent = limited.exec(["python3", "-c", BYTES.format(address=addresses.WEB)], check=True).stdout
    assert 0.01 < float(sent) < 3, "a burst of one second, buffers, then 1 MiB/s"


def test_the_defaults_of_the_settings_are_those_of_the_rules():
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert NetworkLimits() == NetworkLimits.of_rates(
        connections=defaults["network_connections"],
        new_connections_per_s=defaults["network_new_connections_per_s"],
        packets_per_s=defaults["network_packets_per_s"],
        megabytes_per_s=defaults["network_mib_per_s"],
        names_per_s=defaults["network_names_per_s"],
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("network_connections", 0),
        ("network_connections", 65_536),
        ("network_new_connections_per_s", 0),
        ("network_packets_per_s", "many"),
        ("network_mib_per_s", -1),
        ("network_names_per_s", 3),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        load_settings(**{name: value})
    assert name in caught.value.what
    assert name.upper() in caught.value.hint


def test_the_helper_that_makes_slots_is_told_of_them(tmp_path):
    recipe = SlotRecipe(
        folder=tmp_path,
        hub=tmp_path / "hub",
        block=IPv4Network("10.231.0.0/24"),
        limits=NetworkLimits(concurrent_connections=77, megabytes_per_s=5),
    )
    told = json.loads(json.dumps(recipe.to_json()))
    assert SlotRecipe.from_json(told) == recipe
