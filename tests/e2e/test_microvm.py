"""A sandbox with a kernel of its own, from the SDK: its network, its level, its root, and how it ends."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator

import pytest

from cpuos import Client, Network, Sandbox
from cpuos.errors import CpuosError
from cpuos.testing.sealed import SealedInstance, SealedWorld, addresses
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.microvm, pytest.mark.timeout(400)]

# Tries what is in its arguments and tells what came of each. Python's start is what takes long here.
TRIES = """
import json, socket, sys
for kind, place, port in json.loads(sys.argv[1]):
    try:
        if kind == "name":
            print(socket.getaddrinfo(place, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        else:
            socket.create_connection((place, port), 20).close()
            print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
CROWD = """
import os, signal
children = []
try:
    while len(children) < 1000:
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except BlockingIOError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
print(len(children))
"""
HOG = "held = []\nwhile True: held.append(b'x' * (8 << 20))"
SMALL = {"template": "base", "cpu": 1, "memory": "256MiB", "disk": "128MiB", "max_processes": 64, "timeout": "20m"}


@pytest.fixture(scope="module")
def instance(sealed: SealedWorld) -> Iterator[SealedInstance]:
    sealed.names.set("web.allowed.example", [addresses.WEB])
    sealed.names.set("other.example", [addresses.OTHER_WEB])
    # Beside gVisor, as on a host where both are set up; emulation only for who asks.
    with sealed.instance(runtime="gvisor", max_sandboxes=4) as made:
        yield made


@pytest.fixture(scope="module")
def client(instance: SealedInstance) -> Client:
    return instance.client()


@pytest.fixture(scope="module")
def machine(client: Client) -> Iterator[Sandbox]:
    options = {**SMALL, "template": "python", "network": Network(allow=["*.allowed.example"])}
    with Sandbox.create(client=client, runtime="microvm", allow_emulated=True, **options) as sandbox:
        yield sandbox


def attempt(sandbox: Sandbox, *tries: tuple[str, str, int]) -> list[str]:
    result = sandbox.exec(["python3", "-c", TRIES, json.dumps(tries)], timeout=120, check=True)
    return result.stdout.split()


def test_its_level_is_on_record_and_emulation_is_asked_for(client: Client, machine: Sandbox) -> None:
    assert machine.isolation in ("microvm", "emulated")
    assert machine.isolation_detail.startswith("qemu ")
    (listed,) = [entry for entry in Sandbox.list(client=client) if entry.id == machine.id]
    assert (listed.isolation, listed.runtime) == (machine.isolation, "microvm")
    assert machine.exec("uname -r", check=True).stdout.strip() != platform.release()
    if machine.isolation == "microvm":
        pytest.skip("KVM boots here: nothing is emulated")
    with pytest.raises(CpuosError) as caught:
        Sandbox.create(client=client, runtime="microvm", **SMALL)
    assert (caught.value.code, "only emulated" in str(caught.value)) == ("runtime_unavailable", True)
    with pytest.raises(CpuosError) as caught:
        Sandbox.create(client=client, min_isolation="microvm", allow_emulated=True, **SMALL)
    assert caught.value.code == "runtime_unavailable"
    with Sandbox.create(client=client, allow_emulated=True, **SMALL) as strongest:
        assert strongest.isolation == "gvisor"


def test_the_same_rules_hold_on_its_tap(sealed: SealedWorld, machine: Sandbox) -> None:
    sealed.clear()
    assert attempt(
        machine,
        ("name", "web.allowed.example", 443),
        ("tcp", addresses.WEB, 443),
        ("name", "other.example", 443),
        ("tcp", addresses.OTHER_WEB, 443),
        ("tcp", addresses.METADATA, 80),
        ("tcp", addresses.HOST, 80),
    ) == [addresses.WEB, "connected", "gaierror", *["ConnectionRefusedError"] * 3]
    machine.network.update("off")
    assert attempt(machine, ("tcp", addresses.WEB, 443)) == ["ConnectionRefusedError"]
    reached = {packet.destination for packet in sealed.packets() if packet.protocol in ("tcp", "udp")}
    assert reached <= {addresses.WEB, *addresses.RESOLVERS}


def test_root_may_do_what_root_may_do_inside(machine: Sandbox) -> None:
    """It is the guest's own kernel. What it may not is leave: the link's address is the slot's, the disks are its."""
    script = """
        mkdir /tmp/m; mount -t tmpfs none /tmp/m; grep -c /tmp/m /proc/mounts
        ls /sys/block; cat /sys/class/net/eth0/address
        ip address add 10.0.0.9/30 dev eth0; ping -c 1 -W 1 -I 10.0.0.9 10.0.0.1 >/dev/null || echo no answer
        dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=fsync 2>&1 | head -n 1
    """
    lines = machine.exec(script, user="root", timeout=120).stdout.splitlines()
    assert lines[0] == "1"
    assert {"vda", "vdb", "vdc"} == {name for name in lines[1:4] if name.startswith("vd")}
    assert "02:00:0a:00:00:02" in lines
    assert "no answer" in lines
    assert "not permitted" in lines[-1], lines
    assert machine.exec("echo still here", check=True).stdout == "still here\n"


def test_limits_of_processes_and_disk_are_kept(machine: Sandbox) -> None:
    refused = machine.exec("dd if=/dev/zero of=big bs=1M count=200 2>&1; rm big", timeout=300)
    assert "No space left on device" in refused.stdout
    refused = machine.exec(
        "dd if=/dev/zero of=/var/tmp/big bs=1M count=200 2>&1; rm /var/tmp/big", user="root", timeout=300
    )
    assert "No space left on device" in refused.stdout
    crowd = machine.exec(["python3", "-c", CROWD], timeout=120, check=True)
    assert 16 <= int(crowd.stdout) <= SMALL["max_processes"]
    assert machine.exec("echo well", timeout=60, check=True).stdout == "well\n"


def test_it_is_told_which_limit_was_met(machine: Sandbox) -> None:
    """Root's programs are ended as any; the agent and the sandbox go on."""
    hog = machine.exec(["python3", "-c", HOG], user="root", timeout=300)
    assert hog.status == "oom_killed", hog
    full = machine.exec("dd if=/dev/zero of=big bs=1M count=200; e=$?; sync; exit $e", timeout=300)
    machine.exec("rm big", check=True)
    told = [result.limit_reached for result in (hog, full)]
    assert [(one.limit, one.seen_by, one.path) for one in told if one is not None] == [
        ("memory", "guest", None),
        ("disk", "guest", "/workspace"),
    ]
    assert machine.exec("echo well", timeout=60, check=True).limit_reached is None


def test_a_fork_and_a_create_from_its_snapshot_are_not_it(client: Client, machine: Sandbox) -> None:
    machine.exec("echo root > /opt/copied && echo work > copied", user="root", check=True)
    snapshot = machine.snapshot()
    ids = {machine.exec("cat /etc/machine-id", check=True).stdout}
    try:
        with (
            Sandbox.create(client=client, snapshot=snapshot, allow_emulated=True) as copy,
            machine.fork(1)[0] as fork,
        ):
            for one in (copy, fork):
                assert (one.isolation_detail.split()[0], one.started_from) == ("qemu", "restore")
                assert one.exec("cat /opt/copied copied", check=True).stdout == "root\nwork\n"
                ids.add(one.exec("cat /etc/machine-id", check=True).stdout)
            copy.exec("echo other > /workspace/copied", user="root", check=True)
            assert fork.files.read("copied") == machine.files.read("copied") == b"work\n"
    finally:
        snapshot.delete()
    assert len(ids) == 3


def test_it_goes_on_where_it_stood_still(sealed: SealedWorld, machine: Sandbox) -> None:
    machine.network.update(Network(allow=["*.allowed.example"]))
    job = machine.spawn("n=0; while sleep 0.1; do n=$((n+1)); echo $n; done")
    machine.exec("echo root > /opt/held && echo work > held", user="root", check=True)
    for _ in range(2):  # the second time it was itself taken up
        wait_until(lambda: job.output())
        machine.pause()
        machine.resume()
        assert (machine.info.state, machine.info.reason) == ("running", "")
        before = len(job.output().split())
        wait_until(lambda before=before: len(job.output().split()) > before + 3)
        assert machine.exec("cat /opt/held held", check=True).stdout == "root\nwork\n"
    numbers = job.output().decode().split()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    job.kill()
    told = float(machine.exec("date +%s.%N", check=True).stdout)
    assert abs(told - time.time()) < 5
    sealed.clear()
    assert attempt(machine, ("tcp", addresses.WEB, 443), ("name", "web.allowed.example", 443)) == [
        "ConnectionRefusedError",  # by its address, before its name was asked for
        addresses.WEB,
    ]


def test_it_outlives_the_node_and_is_lost_with_its_vmm(
    instance: SealedInstance, client: Client, machine: Sandbox
) -> None:
    machine.files.write("kept", b"words")
    machine.exec("sync", check=True)  # what is not on its disk goes with its kernel
    job = machine.spawn("sleep 3; echo done > ended; sleep 600")
    instance.kill("node")
    instance.wait_ready()
    assert machine.files.read("kept") == b"words"
    assert machine.exec("until test -e ended; do sleep 0.2; done; cat ended", timeout=120).stdout == "done\n"
    assert job.id in [command.id for command in machine.commands.list()]
    began = time.monotonic()
    instance.kill_sandbox(machine.id)
    while Sandbox.connect(machine.id, client=client).state == "running":
        assert time.monotonic() - began < 20
        time.sleep(0.1)
    assert Sandbox.connect(machine.id, client=client).state == "lost"
    # Its files can begin another machine, for only a guest's kernel reads them again.
    machine.recreate()
    assert machine.isolation_detail.startswith("qemu ")
    assert machine.files.read("kept") == b"words"
    machine.kill()
    deadline = time.monotonic() + 60
    while left := [trace for trace in instance.leftovers() if trace.split()[0] not in ("disk", "record", "image")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
