"""Sandboxed code looks for the host: environment, files, keys, sockets, processes, network, kernel: each a try."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuos import Client, Sandbox

pytestmark = pytest.mark.gvisor


@pytest.fixture(scope="module")
def sandbox(client: Client):
    with Sandbox.create(client=client, memory="1GiB", disk="512MiB", timeout="20m") as sandbox:
        yield sandbox


def as_root(sandbox: Sandbox, command: str) -> str:
    result = sandbox.exec(command, user="root", timeout=60)
    return result.stdout + result.stderr


def test_environment_holds_nothing_of_the_host(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = as_root(sandbox, "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; env")
    names = {line.split("=")[0] for line in seen.splitlines() if "=" in line}
    allowed = {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TERM",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "LC_ALL",
        "CPUOS_COMMAND",
        "GOMAXPROCS",  # of the agent, and the same on every host
        "CPUOS_SANDBOX",  # of the agent: its own id, which its host name tells too
        "DEBIAN_FRONTEND",
    }
    assert names - allowed == set()


def test_host_files_are_not_there(sandbox: Sandbox, instance) -> None:
    for path in (
        instance.state_dir,
        instance.run_dir,
        "/run/docker.sock",
        "/run/containerd",
        "/root/.ssh",
        "/root/.config",
        "/etc/shadow-",
    ):
        assert "No such file" in as_root(sandbox, f"ls -la {path}")
    marker = Path("/etc/cpuos-host-marker")
    marker.write_text("host")
    try:
        assert "No such file" in as_root(
            sandbox, f"cat {marker} /proc/1/root{marker} /proc/self/cwd/../../../../..{marker}"
        )
    finally:
        marker.unlink()


def test_host_processes_are_not_seen(sandbox: Sandbox) -> None:
    seen = as_root(sandbox, "ps -eo pid,args; ls /proc")
    assert "runsc" not in seen
    assert "cpuos.node" not in seen
    assert f"\n{os.getpid()} " not in seen


def test_devices_and_kernel_interfaces(sandbox: Sandbox) -> None:
    for path in (
        "/dev/sda",
        "/dev/vda",
        "/dev/kvm",
        "/dev/mem",
        "/dev/loop0",
        "/proc/kcore",
        "/sys/firmware",
        "/proc/sysrq-trigger",
    ):
        assert as_root(sandbox, f"head -c 16 {path} | wc -c").split()[0] == "0"
    assert sandbox.exec("mknod /tmp/vda b 254 0 && head -c 16 /tmp/vda", user="root").stdout == ""
    assert os.uname().release not in as_root(sandbox, "uname -r; cat /proc/version")


def test_mounts_and_modules_are_refused(sandbox: Sandbox) -> None:
    for command in (
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /.cpuos",
        "echo x > /.cpuos/cpuos-agent",
        "echo 1000000 > /sys/fs/cgroup/pids.max",
        "unshare -m true",
        "nsenter -t 1 -m true",
        "chroot /proc/1/root/../../.. ls /work",
    ):
        assert sandbox.exec(command, user="root").exit_code != 0, command


def test_nothing_of_its_router_and_host_but_the_forwarder(sandbox: Sandbox) -> None:
    """The instance has no uplink: the tries stay inside its own namespaces."""
    probe = """
import socket
targets = [("10.0.0.1", 22), ("10.0.0.1", 8443), ("10.0.0.1", 7070), ("169.254.169.254", 80), ("127.0.0.1", 7071)]
for address, port in targets:
    s = socket.socket(); s.settimeout(1.5)
    try:
        s.connect((address, port)); print("REACHED", address, port)
    except OSError as error:
        print("refused", address, port, error)
"""
    sandbox.files.write("/tmp/probe.py", probe)
    seen = as_root(sandbox, "python3 /tmp/probe.py")
    assert "REACHED" not in seen
    assert len([line for line in seen.splitlines() if line.startswith("refused ")]) == 5


def test_the_agent_takes_nothing_from_inside(sandbox: Sandbox) -> None:
    probe = """
import socket
for address in ("10.0.0.2", "127.0.0.1"):
    s = socket.socket(); s.settimeout(2)
    try:
        s.connect((address, 1))
        s.sendall(b"GET /v1/commands HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer 00\\r\\n\\r\\n")
        print("ANSWER", s.recv(100)[:20])
    except OSError as error:
        print("no", error)
"""
    sandbox.files.write("/tmp/agent_probe.py", probe)
    seen = as_root(sandbox, "python3 /tmp/agent_probe.py")
    assert " 200" not in seen
    assert sandbox.exec("true").ok


def test_links_never_lead_the_file_api_outside(sandbox: Sandbox, client: Client) -> None:
    sandbox.exec("ln -s / rootlink; ln -s /proc/1/root procroot; ln -s ../../../../../etc up; mkfifo pipe", check=True)
    assert sandbox.files.read("rootlink/etc/hostname") == sandbox.files.read("/etc/hostname")
    with pytest.raises(Exception, match="cannot"):
        sandbox.files.read("rootlink/etc/shadow")
    with pytest.raises(Exception, match="cannot"):
        sandbox.files.read("pipe")
    with pytest.raises(Exception, match="cannot"):
        sandbox.files.write("up/cpuos-planted", b"x")
    assert not Path("/etc/cpuos-planted").exists()
