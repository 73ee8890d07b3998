"""The jail, with a program that looks around in the place of a VMM."""

from __future__ import annotations

import json
import os
import select
import socket
from pathlib import Path

import pytest

from cpuos.node.network.namespaces import in_fresh_thread, inside, keep_namespace, new_namespace, release_namespace
from cpuos.node.network.tap import make_tap
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.microvm.launch import Launch, launch, user_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ID = "j" * 20
LOOK = r"""
import json, os, socket, sys
def tried(work):
    try:
        return work() or "done"
    except OSError as problem:
        return os.strerror(problem.errno)
found = {
    "ids": os.getresuid() + os.getresgid(),
    "groups": os.getgroups(),
    "root": sorted(os.listdir("/")),
    "boot": sorted(os.listdir("/boot")),
    "devices": sorted(os.listdir("/dev")),
    "descriptors": [n for n in range(256) if tried(lambda: os.fstat(n) and None) == "done"],
    "write usr": tried(lambda: open("/usr/mark", "w").close()),
    "write root": tried(lambda: open("/mark", "w").close()),
    "write boot": tried(lambda: open("/boot/mark", "w").close()),
    "mknod": tried(lambda: os.mknod("/dev/shm", 0o20666, os.makedev(1, 1))),
    "become root": tried(lambda: os.setuid(0)),
    "links": [name for _, name in socket.if_nameindex()],
    "template": tried(lambda: os.write(100, b"x") and None),
    "disk": tried(lambda: os.pwrite(101, b"from inside", 0) and None),
    "tap": tried(lambda: os.write(102, b"\xff" * 6 + b"\2" * 6 + b"\x88\xb5" + b"hello" + bytes(50)) and None),
    "control": tried(lambda: socket.socket(fileno=os.dup(103)).getsockname()),
    "host name": tried(lambda: open("/etc/passwd").close()),
    "core": __import__("resource").getrlimit(__import__("resource").RLIMIT_CORE),
    "privileges": __import__("ctypes").CDLL(None).prctl(39, 0, 0, 0, 0),
    "environment": sorted(os.environ),
}
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the program saw, and what was true of it from outside."""
    folder = tmp_path_factory.mktemp("jail")
    boot, router = folder / "boot", folder / "router"
    boot.mkdir()
    (boot / "vmlinux").write_text("kernel")
    (folder / "root").mkdir()
    (folder / "template").write_bytes(b"template")
    (folder / "disk").write_bytes(bytes(4096))
    groups = ControlGroups("7e57aa")
    made = groups.create(ID, memory_mib=256, cpu=1, processes=16)
    in_fresh_thread(lambda: _make_router(router))
    uid = user_for(ID, taken=())
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(folder / "control"))
        control.listen()
        plan = Launch(
            name=ID,
            command=["/usr/bin/python3", "-I", "-S", "-c", LOOK],
            root=folder / "root",
            boot=boot,
            uid=uid,
            groups=tuple(made),
            files={100: (folder / "template", False), 101: (folder / "disk", True)},
            tap=(102, router, "lan"),
            control=103,
        )
        listener = inside(router, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
        pid, output = launch(plan, control=control)
    try:
        text = b""
        while not text.endswith(b"\n"):
            assert select.select([output], [], [], 30)[0]
            piece = os.read(output, 65536)
            assert piece, text.decode()
            text += piece
        found = json.loads(text)
        found["uid"] = uid
        found["folder"] = folder
        found["in groups"] = pid in groups.processes(ID)
        found["limits"] = [(group / "pids.max").read_text() for group in made if (group / "pids.max").exists()]
        found["frame"] = listener.recv(4096)
        found["namespaces"] = {
            name: os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
            for name in ("net", "mnt", "ipc", "uts")
        }
        yield found
    finally:
        os.close(output)
        listener.close()
        groups.kill(ID)
        os.waitpid(pid, 0)
        groups.remove(ID)
        groups.remove_parent()
        release_namespace(router)


def _make_router(path: Path) -> None:
    os.close(new_namespace())
    keep_namespace(path)
    make_tap("lan", mac="02:00:0a:00:00:01")
    os.system("ip link set lan up")


def test_it_is_a_user_of_its_own_and_stays_one(seen):
    assert seen["ids"] == [seen["uid"]] * 6
    assert seen["groups"] == []
    assert seen["privileges"] == 1
    assert seen["become root"] == "Operation not permitted"
    assert seen["mknod"] in ("Operation not permitted", "Read-only file system", "Permission denied")
    assert seen["core"] == [0, 0]
    assert set(seen["environment"]) <= {"LANG", "LC_CTYPE", "PATH"}


def test_it_sees_programs_and_what_it_boots_from_and_writes_nowhere(seen):
    assert set(seen["root"]) <= {"bin", "boot", "dev", "lib", "lib64", "usr"}
    assert seen["boot"] == ["vmlinux"]
    assert seen["devices"] == ["null", "random", "urandom", "zero"]
    assert seen["host name"] == "No such file or directory"
    assert {seen["write usr"], seen["write root"], seen["write boot"]} <= {"Read-only file system", "Permission denied"}


def test_it_holds_what_it_was_handed_and_nothing_else(seen):
    assert [n for n in seen["descriptors"] if n not in (0, 1, 2)] == [100, 101, 102, 103]
    assert seen["template"] == "Bad file descriptor"
    assert seen["disk"] == "done"
    assert (seen["folder"] / "disk").read_bytes().startswith(b"from inside")
    assert (seen["folder"] / "template").read_bytes() == b"template"
    assert str(seen["control"]).endswith("/control")


def test_frames_go_to_the_router_and_it_is_in_no_network(seen):
    assert seen["links"] == ["lo"]
    assert seen["tap"] == "done"
    assert b"hello" in seen["frame"]
    assert not any(seen["namespaces"].values())


def test_its_limits_hold_before_it_begins(seen):
    assert seen["in groups"]
    assert seen["limits"] == ["16\n"]


def test_no_two_machines_share_a_user():
    taken: set[int] = set()
    for number in range(200):
        uid = user_for(f"{number:020d}", taken=taken)
        assert uid not in taken
        assert 0x7000_0000 <= uid < 0x7F00_0000
        taken.add(uid)
    first = user_for(ID, taken=())
    assert user_for(ID, taken={first}) == first + 1
