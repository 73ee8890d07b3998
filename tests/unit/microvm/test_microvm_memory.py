"""A guest's memory: what a VMM gets when it opens it, what it can do with it, and what is kept of it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cpuos.errors import PlatformError
from cpuos.runtimes.microvm import jail
from cpuos.runtimes.microvm.memory import HELD_AS, answer_open, copy_file, copy_memory, held_memory, make_memory
from cpuos.runtimes.microvm.qemu import Qemu
from cpuos.runtimes.microvm.saved import Facts, kind_for, read_facts, save, save_layer, take_layer, write_facts
from cpuos.runtimes.microvm.vmm import Machine, Memory

MIB = 1 << 20
# Enters what a VMM enters, and opens as it does: for writing, by a name that is not there.
GUEST = f"""
import ctypes, os, sys
sys.path.insert(0, {str(Path(jail.__file__).parent)!r})
import jail
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
jail._ask_for_memory(int(sys.argv[1]))
print(os.open("/dev/null", os.O_RDONLY) > 0)  # any other open is as ever
number = libc.open(b"/ram", os.O_RDWR)
print(number, os.fstat(number).st_size)
try:
    os.pwrite(number, b"x", 0)
    print("written")
except OSError as error:
    print(error.errno)
print(libc.open(b"/etc/hostname", os.O_RDWR))  # nobody listens any more
sys.stdin.read()
"""


def opened(memory: int) -> tuple[list[str], int]:
    """What a program says that was given this for its open, and what its memory is then."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            argv = [sys.executable, "-c", GUEST, str(theirs.fileno())]
            keep = {"pass_fds": [theirs.fileno()], "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            program = subprocess.Popen(argv, **keep)
        answer_open(ours, memory, limit_s=20)
    assert program.stdout is not None
    said = [program.stdout.readline().strip() for _ in range(4)]
    pidfd = os.pidfd_open(program.pid)
    try:
        held = held_memory(pidfd, size_mib=1)
    finally:
        os.close(pidfd)
        program.communicate()
    return said, held


@pytest.mark.skipif(os.geteuid() != 0, reason="a descriptor of another process needs root")
def test_a_new_memory_is_written_to_and_an_image_is_not(tmp_path: Path) -> None:
    memory = make_memory(1)
    said, held = opened(memory)
    assert said == ["True", f"{HELD_AS} {MIB}", "written", "-1"]
    assert os.pread(held, 1, 0) == b"x"
    image = tmp_path / "ram"
    image.write_bytes(bytes(MIB))
    read_only = os.open(image, os.O_RDONLY)
    said, same = opened(read_only)
    assert said == ["True", f"{HELD_AS} {MIB}", str(errno.EBADF), "-1"]
    assert image.read_bytes() == bytes(MIB)
    with mmap.mmap(read_only, MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        mapped[0] = 1  # as a VMM maps it: its own copy
    assert image.read_bytes() == bytes(MIB)
    for descriptor in (memory, held, read_only, same):
        os.close(descriptor)


def test_a_program_that_ends_before_it_opens_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        answer_open(ours, 0, limit_s=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="a descriptor of another process needs root")
def test_what_lies_in_the_place_of_the_memory_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    read, write = os.pipe()
    small = os.open(tmp_path / "small", os.O_RDONLY)
    own = os.pidfd_open(os.getpid())
    for other in (read, small):
        os.dup2(other, HELD_AS)
        with pytest.raises(OSError, match="not its memory"):
            held_memory(own, size_mib=1)
        os.close(HELD_AS)
    with pytest.raises(OSError, match="pidfd_getfd"):
        held_memory(own, size_mib=1)
    for descriptor in (read, write, small, own):
        os.close(descriptor)


def test_only_what_is_not_zero_is_kept_of_a_memory(tmp_path: Path) -> None:
    memory = make_memory(32)
    os.pwrite(memory, b"a", 5)
    os.pwrite(memory, bytes(8 * MIB), 8 * MIB)  # touched, and zero
    os.pwrite(memory, b"z", 32 * MIB - 1)
    copy_memory(memory, tmp_path / "ram")
    kept = tmp_path / "ram"
    assert kept.stat().st_size == 32 * MIB
    assert kept.stat().st_blocks * 512 <= MIB
    whole = kept.read_bytes()
    assert (whole[5:6], whole[-1:], whole.count(0)) == (b"a", b"z", 32 * MIB - 2)
    copy_file(kept, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == whole
    assert (tmp_path / "copy").stat().st_blocks * 512 <= MIB
    with pytest.raises(FileExistsError):
        copy_memory(memory, kept)
    os.close(memory)


def test_a_layer_is_saved_once_and_taken_as_it_was(tmp_path: Path) -> None:
    disk = tmp_path / "root.image"
    disk.write_bytes(b"then")
    (tmp_path / "image").mkdir()
    for name in ("memory", "root"):
        folder = tmp_path / "image" / name
        save("a" * 20, folder, lambda folder=folder: save_layer(disk, folder))
    files = [tmp_path / "image" / name / "layer.image" for name in ("memory", "root")]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    disk.write_bytes(b"now")
    take_layer(tmp_path / "image" / "root", disk)
    assert disk.read_bytes() == b"then"
    disk.write_bytes(b"later")
    assert files[0].read_bytes() == b"then"


def test_after_a_failed_save_there_is_none(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(PlatformError, match="broken"):
        save("a" * 20, tmp_path / "image", fail)
    assert not (tmp_path / "image").exists()


def test_an_image_of_another_version_is_refused(tmp_path: Path) -> None:
    image = tmp_path / "machine.json"
    image.write_text(json.dumps({"version": "qemu 7.2 tcg aa-bb", "has_memory": True}))
    assert kind_for(tmp_path, version="qemu 7.2 tcg aa-bb") is Memory.PRIVATE
    with pytest.raises(PlatformError, match=r"saved by qemu 7\.2 tcg aa-bb, and this node has qemu 8\.0") as caught:
        kind_for(tmp_path, version="qemu 8.0 tcg aa-bb")
    assert caught.value.code == "snapshot_incompatible"
    image.write_text("{}")
    with pytest.raises(PlatformError) as caught:
        kind_for(tmp_path, version="x")
    assert caught.value.code == "snapshot_damaged"


def test_what_a_running_one_is_outlives_the_daemon(tmp_path: Path) -> None:
    facts = Facts(uid=7, version="v", memory=Memory.PRIVATE)
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path) == facts
    (tmp_path / "vm.json").write_text('{"uid": 7}')
    with pytest.raises(OSError, match="cannot be read"):
        read_facts(tmp_path)


def test_an_identity_is_of_the_program_and_the_devices(tmp_path: Path) -> None:
    def qemu(version: str) -> Qemu:
        program = tmp_path / version
        program.write_text(f"#!/bin/sh\necho QEMU emulator version {version}\n")
        program.chmod(0o755)
        # Where it lies is part of its command line, and no other way to tell two apart.
        return Qemu(kvm=False, program=program)

    machine = Machine(kernel="/k", initrd="/i", arguments="a", cpu=1, memory_mib=256, memory=Memory.SHARED)
    one = qemu("7.2.22")
    same = Machine(**(vars(machine) | {"arguments": "b", "memory": Memory.PRIVATE, "saved": Path("/state")}))
    assert one.identity(machine) == one.identity(same)
    assert one.identity(machine).startswith("qemu 7.2.22 tcg ")
    with_a_link = Machine(**(vars(machine) | {"tap": 5, "guest_mac": "02:00:00:00:00:01"}))
    assert one.identity(machine) != one.identity(with_a_link)
    assert qemu("7.2.23").identity(machine).split()[:3] == ["qemu", "7.2.23", "tcg"]


def test_the_memory_is_a_file_of_nobodys_name_on_the_command_line() -> None:
    def words(memory: Memory) -> str:
        machine = Machine(kernel="/k", initrd="/i", arguments="", cpu=1, memory_mib=256, memory=memory)
        return " ".join(Qemu(kvm=False).command(machine))

    assert "memory-backend" not in words(Memory.OWN)
    assert "mem-path=/ram,size=256M,share=on" in words(Memory.SHARED)
    assert "mem-path=/ram,size=256M,share=off" in words(Memory.PRIVATE)
