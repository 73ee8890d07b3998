"""The driver with Firecracker, against programs that answer as its public description says, or do not.

They are in `tests/firecracker`. The jail, its user, its mounts, its tap and its end are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.node.network.namespaces import in_fresh_thread, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.tap import make_tap
from cpuos.plugins import RuntimeHost
from cpuos.runtimes.base import SandboxSpec
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm import firecracker
from cpuos.runtimes.microvm.runtime import MicrovmRuntime
from cpuos.testing.waiting import until
from cpuos.types.sandbox import Isolation
from firecracker_description import problems_with
from firecracker_host import Host, find_requests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# Of this process: several may test at a time.
ID, INSTANCE = f"{os.getpid():020d}", f"{os.getpid():06x}"
RATES = {"disk_mib_per_s": 200, "network_mib_per_s": 100, "network_packets_per_s": 5000}
BOOT = [
    "GET /version",
    "PUT /logger",
    "PUT /metrics",
    "PUT /machine-config",
    "PUT /boot-source",
    "PUT /drives/template",
    "PUT /drives/root",
    "PUT /drives/workspace",
    "PUT /network-interfaces/eth0",
    "PUT /entropy",
    "PUT /actions",
]
LONG = "9" * 5000


@pytest.fixture(autouse=True)
def kvm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuos.runtimes.microvm.probe.os.path.exists", lambda path: True)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A slot, as far as a VMM is concerned."""
    path = tmp_path_factory.mktemp("slot") / "router"

    def make() -> None:
        os.close(new_namespace())
        keep_namespace(path)
        make_tap("lan", mac="02:00:0a:00:00:01")

    in_fresh_thread(make)
    yield path
    release_namespace(path)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "programs")


@pytest.fixture
def spec(tmp_path: Path, router: Path) -> SandboxSpec:
    image = tmp_path / "data" / "microvm"
    image.mkdir(parents=True)
    for name in ("vmlinux", "initrd"):
        (image / name).write_text(name)
    manifest = {"format": 1, "kernel": "vmlinuz-1", "vmlinux": "sha256:1", "initrd": "sha256:2"}
    (image / "manifest.json").write_text(json.dumps(manifest))
    disk, work = tmp_path / "disk", tmp_path / "work"
    for folder in (disk, work):
        folder.mkdir(mode=0o700)
    for name in ("image", "root.image"):
        (disk / name).write_bytes(bytes(4096))
        (disk / name).chmod(0o600)
    (tmp_path / "template").write_bytes(b"template")
    return SandboxSpec(
        id=ID,
        generation=1,
        hostname="box",
        cpu=2,
        memory_mib=256,
        disk_mib=64,
        max_processes=64,
        template_image=tmp_path / "template",
        workdir=work,
        disk=disk,
        netns=router,
        agent=tmp_path,
        node_public_key=bytes(32),
        own_kernel=True,
    )


@pytest.fixture
async def driver(tmp_path: Path, host: Host, spec: SandboxSpec) -> AsyncIterator[MicrovmRuntime]:
    made = make_driver(tmp_path, host)
    yield made
    await made.destroy(ID)
    await made.close()
    assert traces(tmp_path) == []


def make_driver(folder: Path, host: Host) -> MicrovmRuntime:
    for name in ("state", "run"):
        (folder / name).mkdir(exist_ok=True)
    own = {"state_dir": folder / "state", "run_dir": folder / "run"}
    return MicrovmRuntime(
        RuntimeHost(instance_id=INSTANCE, data_dir=folder / "data", **own, programs=host.programs, rates=RATES)
    )


def traces(folder: Path) -> list[str]:
    """All that a machine leaves on a host, and must not: folders, processes, groups, mounts."""
    found = [str(path) for path in (folder / "run").iterdir() if path.name != "probe"]
    found += [str(path) for path in (folder / "run" / "probe").glob("*")]
    found += [path for path in Path("/proc/self/mountinfo").read_text().split() if path.startswith(str(folder))]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words or f"--id\0{ID}" in words:
            found.append(words)
    return found + ControlGroups(INSTANCE).list()


async def test_it_is_the_strongest_that_is_tried_and_a_guest_has_to_answer(driver: MicrovmRuntime) -> None:
    found = await driver.probe()
    assert (found.available, found.isolation, found.detail) == (True, Isolation.MICROVM, "firecracker 1.15.1 kvm")


async def test_each_request_is_as_the_public_description_has_it(driver: MicrovmRuntime, spec: SandboxSpec) -> None:
    process = await driver.start(spec)
    asked = find_requests(process.pid)
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert [what for what, _ in asked if what != "GET /"] == BOOT
    bodies = dict(asked)
    assert bodies["PUT /machine-config"] == {
        "vcpu_count": 2,
        "mem_size_mib": 256,
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
    assert f"Max file size             {(256 << 20) + (64 << 20)}" in limits


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
    tmp_path: Path, spec: SandboxSpec, version: str, jailer: str, why: str
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


def read(path: str | Path) -> str:
    return Path(path).read_text()


def facts_of(pid: int, name: str) -> dict[str, str]:
    return dict(line.split(":\t") for line in read(f"/proc/{pid}/{name}").splitlines() if ":\t" in line)


def driver_folder(spec: SandboxSpec) -> Path:
    return spec.disk.parent / "run" / spec.id


def requests_so_far() -> list[str]:
    """What the machine was asked, if it is there."""
    found = []
    for pid in ControlGroups(INSTANCE).processes(ID):
        try:
            found += [what for what, _ in find_requests(pid)]
        except OSError:
            continue
    return found


SAVE = ["PATCH /vm", "PUT /snapshot/create", "PATCH /vm"]
LOAD = ["GET /version", "PUT /logger", "PUT /metrics", "PUT /snapshot/load", "PATCH /vm"]


async def test_a_machine_is_saved_in_one_moment_and_goes_on(
    tmp_path: Path, driver: MicrovmRuntime, spec: SandboxSpec
) -> None:
    process = await driver.start(spec)
    await driver.checkpoint(ID, image=tmp_path / "image")
    asked = [(what, body) for what, body in find_requests(process.pid) if what != "GET /"][len(BOOT) :]
    assert [what for what, _ in asked] == SAVE
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert [body["state"] for what, body in asked if what == "PATCH /vm"] == ["Paused", "Resumed"]
    assert read(tmp_path / "image" / "state") == "/snapshot/state"
    assert read(tmp_path / "image" / "ram") == "/snapshot/memory"
    assert os.stat(tmp_path / "image" / "layer.image").st_size == 4096
    assert [path.stat().st_size for path in sorted((spec.workdir / "saves").iterdir())] == [0, 0]


async def test_clones_map_one_memory_and_none_can_write_it(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    process = await driver.restore(spec, image=image)
    asked = [(what, body) for what, body in find_requests(process.pid) if what != "GET /"]
    assert [what for what, _ in asked] == LOAD
    assert [problem for what, body in asked for problem in problems_with(what, body)] == []
    assert dict(asked)["PUT /snapshot/load"]["mem_backend"] == {"backend_type": "File", "backend_path": "/image/memory"}
    inside = f"/proc/{process.pid}/root/image/memory"
    assert os.stat(inside).st_ino == os.stat(image / "ram").st_ino
    mounts = [line.split() for line in read(f"/proc/{process.pid}/mountinfo").splitlines()]
    options = {words[4]: words[5].split(",") for words in mounts}
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options["/image/memory"])
    assert {"ro"} <= set(options["/drives/template"]) & set(options["/boot"])
    # Saving it again goes to another file than the one that it maps.
    await driver.checkpoint(ID, image=tmp_path / "second")
    assert read(image / "ram") == "/snapshot/memory"
    assert os.stat(tmp_path / "second" / "ram").st_ino != os.stat(image / "ram").st_ino


async def test_a_save_that_is_refused_leaves_no_image_and_it_runs_on(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.probe()
    host.misbehave('PUT /snapshot/create\t400 {"fault_message": "no room"}')
    process = await driver.start(spec)
    with pytest.raises(PlatformError, match="cannot save"):
        await driver.checkpoint(ID, image=tmp_path / "image")
    assert not (tmp_path / "image").exists()
    assert [path.stat().st_size for path in (spec.workdir / "saves").iterdir()] == [0, 0]
    assert [what for what, _ in find_requests(process.pid)][-3:] == SAVE
    assert await driver._prober._vmms[0].ask_state(driver_folder(spec) / "control", timeout_s=5) == "running"


@pytest.mark.parametrize("step", LOAD)
async def test_a_fault_at_each_step_of_a_restore_leaves_nothing(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec, step: str
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    host.misbehave(f'{step}\t400 {{"fault_message": "it is of another"}}')
    with pytest.raises(PlatformError, match="it is of another"):
        await driver.restore(spec, image=image)
    assert traces(tmp_path) == []
    assert read(image / "ram") == "/snapshot/memory"


async def test_an_image_of_another_version_is_refused(
    tmp_path: Path, driver: MicrovmRuntime, host: Host, spec: SandboxSpec
) -> None:
    await driver.start(spec)
    image = tmp_path / "image"
    await driver.checkpoint(ID, image=image)
    await driver.destroy(ID)
    newer = make_driver(tmp_path, Host(tmp_path / "newer", version="1.16.0", jailer_version="1.16.0"))
    with pytest.raises(PlatformError) as caught:
        await newer.restore(spec, image=image)
    assert caught.value.code == "snapshot_incompatible"
    await newer.close()
