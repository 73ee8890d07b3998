"""Start and end of real gVisor sandboxes, and what the guest finds inside."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time

import pytest

from cpuos.errors import NotFound, PlatformError
from cpuos.runtimes.base import Process
from cpuos.runtimes.gvisor import GvisorRuntime
from cpuos.runtimes.gvisor.bundle import AGENT_TASKS, runsc_flags, write_bundle

pytestmark = pytest.mark.gvisor


async def test_probe_boots_something(machine):
    probe = await machine.runtime.probe()
    assert probe.available, probe.reason
    assert "systrap" in probe.detail


async def test_guest_sees_its_own_limits_and_nothing_else(machine):
    async with machine.guest(cpu=1, memory_mib=512, disk_mib=256, max_processes=77) as guest:
        facts = await guest.run(
            "hostname; nproc; awk '/MemTotal/{print $2}' /proc/meminfo; cat /sys/fs/cgroup/*/pids.max;"
            "df -m --output=size / | tail -1; stat -c %u:%g /workspace; cat /proc/1/cmdline | tr '\\0' ' '"
        )
        hostname, cpus, memory_kib, processes, root_mib, owner, first = [line.strip() for line in facts.splitlines()]
        assert (hostname, cpus, memory_kib, processes) == ("box-1", "1", str(512 * 1024), str(77 + AGENT_TASKS))
        assert 256 <= int(root_mib) <= 256 * 1.05
        assert owner == "1000:1000"
        assert first.startswith("sleep infinity") or guest.id in first
        stats = await machine.runtime.stats(guest.id)
        assert 1 << 20 < stats.memory_bytes < 256 << 20
        assert stats.cpu_seconds > 0
        assert stats.processes >= 1


async def test_guest_reaches_nobody_and_is_reached_by_its_link(machine):
    async with machine.guest() as guest:
        link = await machine.slots.guest_link(guest.id)
        # Nobody listens in this guest: a refusal has come from its network stack.
        with link.socket, pytest.raises(ConnectionRefusedError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().sock_connect(link.socket, link.address)
        started = time.monotonic()
        # A router without a policy refuses all, and says so.
        for target in ("1.1.1.1/80", "169.254.169.254/80", "10.0.0.1/22"):
            assert "refused" in await guest.run(f"true > /dev/tcp/{target}")
        assert time.monotonic() - started < 60
        assert (await guest.try_run("true > /dev/tcp/127.0.0.1/1"))[0] != 0


async def test_host_secrets_are_not_visible(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("CPUOS_TEST_SECRET", "zebra-in-env")
    (tmp_path / "secret").write_text("zebra-in-file")
    async with machine.guest() as guest:
        searched = await guest.run(
            "cat /proc/*/environ /proc/*/cmdline /proc/mounts /proc/cmdline 2>/dev/null | tr '\\0' '\\n';"
            "ls /dev; ls -a /.cpuos; find / -xdev -name '*.sock' 2>/dev/null"
        )
        assert "zebra" not in searched
        assert str(tmp_path) not in searched
        assert not {"kvm", "loop-control", "vda", "sda", "mem"} & set(searched.split())
        code, _ = await guest.try_run(f"cat {tmp_path}/secret")
        assert code != 0
        for command in (
            "touch /.cpuos/x",
            "echo 1000 > /sys/fs/cgroup/*/pids.max",
            "mount -t tmpfs none /mnt",
            "mknod /workspace/d b 7 0 && cat /workspace/d",
        ):
            assert (await guest.try_run(command))[0] != 0, command


async def test_setuid_and_links_in_workspace_mean_nothing_to_the_host(machine):
    async with machine.guest() as guest:
        await guest.run("cp /bin/id /workspace/id; chmod 4755 /workspace/id; ln -s /etc/passwd /workspace/link")
        workspace = guest.spec.disk / "workspace"
        assert os.statvfs(workspace).f_flag & os.ST_NOSUID
        with pytest.raises(OSError):  # nosymfollow
            (workspace / "link").read_text()
        assert "uid=" in await guest.run("/workspace/id; cat /workspace/link >/dev/null")


async def test_killed_sentry_is_seen_and_workspace_survives(machine):
    async with machine.guest() as guest:
        await guest.run("for i in $(seq 200); do echo $i > /workspace/$i; done; echo tail >> /workspace/200")
        waiting = asyncio.create_task(machine.runtime.wait(guest.id))
        await asyncio.sleep(0)
        os.kill(guest.process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            assert await waiting == "its process ended"
        assert (guest.spec.disk / "workspace" / "200").read_text() == "200\ntail\n"
        await machine.runtime.destroy(guest.id)
        with pytest.raises(NotFound):
            await machine.runtime.stats(guest.id)


async def test_end_of_pid_one_ends_the_sandbox(machine):
    async with machine.guest() as guest:
        await guest.try_run("kill -9 1")
        async with asyncio.timeout(30):
            assert await machine.runtime.wait(guest.id)


async def test_destroy_is_idempotent_and_bears_nothing_there(machine):
    async with machine.guest() as guest:
        waiting = asyncio.create_task(machine.runtime.wait(guest.id))
        await asyncio.sleep(0)
        await machine.runtime.destroy(guest.id)
        await machine.runtime.destroy(guest.id)
        assert await waiting
    await machine.runtime.destroy("z" * 20)


async def test_failed_start_leaves_nothing(machine):
    spec = await machine.prepare(1)
    broken = machine.folder / "broken.erofs"
    broken.write_bytes(b"\0" * 65536)
    for image in (broken, machine.folder / "missing.erofs"):
        with pytest.raises(PlatformError, match="cannot start sandbox"):
            await machine.runtime.start(dataclasses.replace(spec, template_image=image))
        assert await machine.runtime.leftovers() == []
    await machine.take_away(spec.id)


async def test_restarted_node_adopts(machine):
    async with machine.guest() as guest:
        await guest.run("echo before > /root/kept")
        await machine.runtime.close()
        second = GvisorRuntime(machine.host)
        machine.runtime = second
        stranger = Process(pid=guest.process.pid, start_time=guest.process.start_time + 1)
        assert not await second.adopt(guest.spec, stranger)
        assert await second.adopt(guest.spec, guest.process)
        assert await second.adopt(guest.spec, guest.process)
        assert await second.leftovers() == [guest.id]
        assert await guest.run("cat /root/kept") == "before"
        waiting = asyncio.create_task(second.wait(guest.id))
        await asyncio.sleep(0)
        os.kill(guest.process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await waiting


async def test_parallel_starts_are_apart(machine):
    async def life(number: int) -> str:
        async with machine.guest(number, memory_mib=256) as guest:
            await guest.run(f"echo {number} > /workspace/me; echo {number} > /root/me")
            return await guest.run("cat /workspace/me /root/me; hostname; ls /workspace | wc -l")

    answers = await asyncio.gather(*(life(number) for number in range(1, 5)))
    assert answers == [f"{n}\n{n}\nbox-{n}\n1" for n in range(1, 5)]


async def test_what_the_guest_prints_reaches_no_host_file(machine):
    async with machine.guest() as guest:
        await guest.run("head -c 50000000 /dev/zero > /proc/1/fd/1; head -c 50000000 /dev/zero > /proc/1/fd/2")
        assert guest.workdir_bytes() < 1 << 20


async def test_root_in_the_guest_works_as_people_expect(machine):
    async with machine.guest() as guest:
        code, output = await guest.try_run(
            "set -e; useradd -m tester; su tester -c 'id -un'; chroot / true; chown 12:34 /root; "
            'touch /usr/bin/new; rm /usr/bin/new; [ -z "$(command -v sudo)" ] || sudo -n true; ln /etc/hostname /etc/h2'
        )
        assert code == 0, output
        assert "tester" in output


@pytest.mark.parametrize("delay_ms", [5, 25, 50, 80, 120])
async def test_start_that_is_cut_short_leaves_nothing(machine, delay_ms):
    spec = await machine.prepare(1)
    start = asyncio.create_task(machine.runtime.start(spec))
    await asyncio.sleep(delay_ms / 1000)
    start.cancel()
    await asyncio.wait([start])
    assert await machine.runtime.leftovers() == [] or not start.cancelled()
    await machine.take_away(spec.id)


@pytest.mark.parametrize("delay_ms", [10, 60, 120])
async def test_node_killed_in_mid_start_finds_what_is_left(machine, delay_ms):
    """runsc goes on when its node dies; the next node removes by id what the first one began."""
    spec = await machine.prepare(1)
    bundle = write_bundle(spec, cgroups_path=machine.runtime._groups.oci_path(spec.id))
    flags = runsc_flags(
        root=machine.runtime._runsc.root,
        overlay=spec.disk / "overlay",
        log=spec.workdir / "runsc.log",
        panic_log=spec.workdir / "panic.log",
    )
    runsc = await asyncio.create_subprocess_exec(
        str(machine.runtime._runsc.program),
        *flags,
        *("run", "-detach", "-bundle", str(bundle), spec.id),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await asyncio.sleep(delay_ms / 1000)
    second = GvisorRuntime(machine.host)
    await second.destroy(spec.id)
    await runsc.wait()
    if await second.leftovers():
        await second.destroy(spec.id)
    await second.close()
    await machine.take_away(spec.id)
