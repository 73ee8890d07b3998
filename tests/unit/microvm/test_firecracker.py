"""The driver with Firecracker, against programs that answer as its public description says, or do not.

They are in `tests/firecracker`. The jail, its user, its mounts, its tap and its end are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm import firecracker
from cpuos.runtimes.microvm.launch import guest_memory_mib
from cpuos.runtimes.microvm.runtime import MicrovmRuntime
from cpuos.testing.waiting import until
from cpuos.types.sandbox import Isolation
from firecracker_description import problems_with
from firecracker_host import (
    BOOT,
    ID,
    INSTANCE,
    Host,
    driver_folder,
    facts_of,
    find_requests,
    make_driver,
    read,
    requests_so_far,
    traces,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LONG = "9" * 5000


async def test_it_is_the_strongest_that_is_tried_and_a_guest_has_to_answer(driver: MicrovmRuntime) -> None:
    found = await driver.probe()
    assert (found.available, found.isolation, found.detail) == (True, Isolation.MICROVM, "firecracker 1.15.1 kvm")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # As where KVM opens and runs no guest: all calls are answered well.
        ("PUT /actions\t204", "the machine starts, but the guest prints nothing in 1 s"),
        ('PUT /actions\t400 {"fault_message": "no KVM"}', "PUT /actions: 400: no KVM"),
        ("PUT /boot-source\tdie", "closed the connection"),
    ],
)
async def test_a_machine_that_is_said_to_run_proves_nothing(
    driver: MicrovmRuntime, host: Host, spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.setattr("cpuos.runtimes.microvm.probe.KVM_BOOT_S", 1.0)
    driver._prober._vmms = driver._prober._vmms[:1]
    host.misbehave(line)
    found = await driver.probe()
    assert not found.available
    assert found.reason.startswith("firecracker kvm: ")
    assert words in found.reason


async def test_each_request_is_as_the_public_description_has_it(driver: MicrovmRuntime, spec: SandboxSpec) -> None:
    process = await driver.start(spec)
    asked = find_requests(process.pid)
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert [what for what, _ in asked if what != "GET /"] == BOOT
    bodies = dict(asked)
    assert bodies["PUT /machine-config"] == {
        "vcpu_count": 2,
        "mem_size_mib": guest_memory_mib(256),
        "smt": False,
        "track_dirty_pages": False,
    }
    arguments = bodies["PUT /boot-source"]["boot_args"]
    assert arguments.endswith("--drives template,root,workspace")
    assert f"CPUOS_SANDBOX={ID} " in arguments.split(" -- ")[0]
    assert "console=" not in arguments
    assert len(arguments) < 2048  # the most that it takes
    assert bodies["PUT /drives/template"]["is_read_only"] is True
    assert [bodies[f"PUT /drives/{name}"]["cache_type"] for name in ("root", "workspace")] == ["Writeback"] * 2
    assert bodies["PUT /drives/root"]["rate_limiter"] == {"bandwidth": {"size": 200 << 20, "refill_time": 1000}}
    limiter = {"bandwidth": {"size": 100 << 20, "refill_time": 1000}, "ops": {"size": 5000, "refill_time": 1000}}
    interface = bodies["PUT /network-interfaces/eth0"]
    assert interface["rx_rate_limiter"] == interface["tx_rate_limiter"] == limiter
    assert interface["host_dev_name"] == "lan"


async def test_it_is_a_user_of_its_own_in_a_root_of_its_own(
    driver: MicrovmRuntime, spec: SandboxSpec, router: Path
) -> None:
    process = await driver.start(spec)
    status, limits = facts_of(process.pid, "status"), read(f"/proc/{process.pid}/limits")
    uid = json.loads(read(driver_folder(spec) / "vm.json"))["uid"]
    assert status["Uid"].split() == status["Gid"].split() == [str(uid)] * 4
    assert status["Groups"].strip() == ""
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    root = f"/proc/{process.pid}/root"
    mine = ["boot", "dev", "drives", "firecracker", "log", "metrics", "requests", "run", "script", "snapshot"]
    assert sorted(os.listdir(root)) == mine
    assert sorted(os.listdir(f"{root}/dev")) == ["kvm", "net", "urandom"]
    assert sorted(os.listdir(f"{root}/drives")) == ["root", "template", "workspace"]
    assert os.readlink(f"/proc/{process.pid}/ns/net") == f"net:[{os.stat(router).st_ino}]"
    for name in ("mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{process.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    assert process.pid in ControlGroups(INSTANCE).processes(ID)
    assert "Max open files            1024                 1024" in limits
    assert f"Max file size             {(guest_memory_mib(256) << 20) + (64 << 20)}" in limits


async def test_its_socket_has_a_name_that_it_cannot_change(driver: MicrovmRuntime, spec: SandboxSpec) -> None:
    await driver.start(spec)
    folder = driver_folder(spec)
    door = folder / firecracker.DOOR
    assert (door.stat().st_uid, stat.S_IMODE(door.stat().st_mode)) == (0, 0o711)
    assert (folder / "control").lstat().st_ino == (door / "firecracker.socket").lstat().st_ino
    assert stat.S_ISSOCK((folder / "control").lstat().st_mode)


async def test_what_it_says_of_itself_is_kept_within_bounds(driver: MicrovmRuntime, spec: SandboxSpec) -> None:
    await driver.start(spec)
    reports = driver._running[ID].reports
    assert reports is not None
    reports.catch_up()
    assert reports.log_end().endswith("a line of the log")
    assert reports.seccomp_faults() == 3
    pipe = os.open(driver_folder(spec) / "log", os.O_WRONLY)
    for _ in range(40):
        os.write(pipe, b"x" * 4096)
        reports.catch_up()
    os.close(pipe)
    assert len(reports._kept["log"]) == 16 << 10


async def test_a_restarted_node_takes_it_over(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    process = await driver.start(spec)
    await driver.close()
    again = make_driver(tmp_path, host)
    try:
        assert await again.adopt(spec, process)
        assert again._running[ID].reports is not None
        os.kill(process.pid, 9)
        assert await asyncio.wait_for(again.wait(ID), 10) == "its machine stopped"
    finally:
        await again.destroy(ID)
        await again.close()


async def test_a_node_that_knows_it_no_more_keeps_it_running_and_says_so(
    tmp_path: Path, driver: MicrovmRuntime, spec: SandboxSpec
) -> None:
    process = await driver.start(spec)
    await driver.close()
    folders = {"data_dir": tmp_path / "data", "state_dir": tmp_path / "state", "run_dir": tmp_path / "run"}
    again = MicrovmRuntime(RuntimeHost(instance_id=INSTANCE, **folders))
    try:
        assert await again.adopt(spec, process)
        with pytest.raises(PlatformError) as caught:
            await again.checkpoint(ID, image=tmp_path / "image")
        assert "runs in firecracker" in str(caught.value.why)
        assert not (tmp_path / "image").exists()
    finally:
        await again.destroy(ID)
        await again.close()


FAULTS = {
    "refused": ('400 {"fault_message": "it cannot be so"}', "400: it cannot be so"),
    "refused at length": (f'400 {{"fault_message": "{LONG}"}}', "400: 999"),
    "refused without a word": ("400", ": 400: no reason given"),
    "a redirect": ("raw HTTP/1.1 302 \\r\\nLocation: /x\\r\\nContent-Length: 0\\r\\n\\r\\n", ": 302: "),
    "silence": ("silent", "no answer within 3 s"),
    "death": ("die", ""),
    "an endless head": ("flood", "headers over the limit"),
    "a huge body": ("raw HTTP/1.1 200 \\r\\nContent-Length: 9999999\\r\\n\\r\\n", "over the limit of 65536"),
    "two lengths": (
        "raw HTTP/1.1 200 \\r\\nContent-Length: 1\\r\\nContent-Length: 2\\r\\n\\r\\nx",
        "a length that is none",
    ),
    "a length that is none": ("raw HTTP/1.1 200 \\r\\nContent-Length: -1\\r\\n\\r\\n", "a length that is none"),
    "pieces": ("raw HTTP/1.1 200 \\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n", "answered in pieces"),
    "half a body": ("raw HTTP/1.1 200 \\r\\nContent-Length: 10\\r\\n\\r\\nx", "closed the connection"),
    "no HTTP": ("raw SSH-2.0-x\\r\\n\\r\\n", "something else than HTTP/1.1"),
    "no JSON": ("200 <html>", "something else than JSON"),
    "no object": ("200 [1]", "no object"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_says_what_it_was_and_leaves_nothing(
    driver: MicrovmRuntime,
    host: Host,
    spec: SandboxSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    await driver.probe()
    if fault == "silence":
        monkeypatch.setattr(firecracker, "_CALL_S", 3)
    step = "PUT /boot-source"
    action, words = FAULTS[fault]
    host.misbehave(f"{step}\t{action}")
    with pytest.raises(PlatformError) as caught:
        await driver.start(spec)
    assert words in str(caught.value.why)
    assert fault == "death" or step in str(caught.value.why)
    assert len(str(caught.value.why)) < 1200
    assert traces(tmp_path) == []


@pytest.mark.parametrize(
    "fault",
    [
        *(f'{step}\t400 {{"fault_message": "not now"}}' for step in BOOT),
        "start\tdie",
        f"{BOOT[0]}\tdie",
        f"{BOOT[-1]}\tdie",
    ],
)
async def test_a_fault_at_each_step_leaves_nothing(
    driver: MicrovmRuntime, host: Host, spec: SandboxSpec, tmp_path: Path, fault: str
) -> None:
    await driver.probe()
    host.misbehave(fault)
    with pytest.raises(PlatformError):
        await driver.start(spec)
    assert traces(tmp_path) == []


async def test_after_a_fault_nothing_is_in_the_way(driver: MicrovmRuntime, host: Host, spec: SandboxSpec) -> None:
    await driver.probe()
    host.misbehave("PUT /actions\tdie")
    with pytest.raises(PlatformError):
        await driver.start(spec)
    host.misbehave()
    await driver.start(spec)


async def test_a_vmm_that_makes_no_socket_is_waited_for_so_long(
    driver: MicrovmRuntime, host: Host, spec: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.probe()
    monkeypatch.setattr(firecracker, "_SOCKET_S", 0.5)
    host.misbehave("start\tsilent")
    with pytest.raises(PlatformError, match="did not answer within"):
        await driver.start(spec)
    assert traces(tmp_path) == []


async def test_a_cancelled_start_leaves_nothing(
    driver: MicrovmRuntime, host: Host, spec: SandboxSpec, tmp_path: Path
) -> None:
    await driver.probe()
    host.misbehave("PUT /entropy\tsilent")
    starting = asyncio.create_task(driver.start(spec))
    await until(lambda: "PUT /entropy" in requests_so_far())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert traces(tmp_path) == []


@pytest.mark.parametrize(
    ("version", "jailer", "why"),
    [
        ("1.14.3", "1.14.3", "1.14.3 has known holes"),
        ("1.15.0", "1.15.0", "1.15.0 has known holes"),
        ("1.13.9", "1.13.9", "1.13.9 has known holes"),
        ("1.15.1", "1.14.4", "of version 1.15.1 and"),
    ],
)
async def test_versions_with_known_holes_are_not_tried(
    tmp_path: Path, spec: SandboxSpec, kvm_is_there: None, version: str, jailer: str, why: str
) -> None:
    driver = make_driver(tmp_path, Host(tmp_path / "old", version=version, jailer_version=jailer))
    driver._prober._vmms = driver._prober._vmms[:1]
    found = await driver.probe()
    assert not found.available
    assert why in found.reason
    await driver.close()


@pytest.mark.parametrize("version", ["1.14.4", "1.14.5", "1.15.1", "1.16.0", "1.17.0-dev", "2.0.0"])
def test_versions_that_hold_are_taken(version: str) -> None:
    firecracker.check_version(version)


@pytest.mark.parametrize("version", ["", "none", "1.15", "v1.15.1", "1.15.0", "1.14.3", "1.9.9", "0.25.2", "99999.1.1"])
def test_other_versions_are_not(version: str) -> None:
    with pytest.raises(OSError, match="Firecracker"):
        firecracker.check_version(version)
