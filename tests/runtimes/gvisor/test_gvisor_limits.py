"""Sandboxes that take all they can get. They live on, and their neighbours see nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from cpuos.runtimes.gvisor.bundle import AGENT_TASKS

pytestmark = pytest.mark.gvisor

MIB = 1 << 20
# `tail` keeps what it reads: as fast as memory can be filled.
HOG = "head -c 2000000000 /dev/zero | tail > /dev/null"
# Writers that make, overwrite and remove files as fast as they can.
STRESS = """
end=$((SECONDS+{seconds})); mkdir -p {folder}/$1; i=0
while [ $SECONDS -lt $end ]; do i=$(( (i+7) % 60 ))
  dd if=/dev/zero of={folder}/$1/$i bs=$((4096*(1+i%9))) count=8 seek=$((i%5)) conv=notrunc 2>/dev/null
  [ $((i%4)) = 0 ] && rm -f {folder}/$1/$(( (i*3) % 60 )); done; true
"""


@pytest.mark.parametrize("hogs", [1, 2])
async def test_memory_hog_dies_alone(machine, hogs):
    async with machine.guest(memory_mib=512) as guest, machine.guest(2, memory_mib=256) as neighbour:
        started = time.monotonic()
        codes = await asyncio.gather(*(guest.try_run(f"({HOG}); exit ${{PIPESTATUS[0]}}") for _ in range(hogs)))
        assert time.monotonic() - started < 55
        assert all(code != 0 for code, _ in codes)
        assert await guest.run("cat /proc/1/comm && echo alive") == "sleep\nalive"
        kills = [kill for kill in machine.runtime.oom_kills if kill.sandbox_id == guest.id]
        assert len(kills) >= hogs
        named = [kill.pids for kill in kills if kill.pids]  # where the host was not faster
        assert all(pids[0] > 1 for pids in named)
        assert all(len(pids) > 1 for pids in named), "the shell that started it is named too"
        assert await neighbour.run("echo fine") == "fine"


async def test_page_cache_is_not_memory_pressure(machine):
    async with machine.guest(memory_mib=256, disk_mib=512) as guest:
        code, output = await guest.try_run("for d in /root /workspace; do head -c 450000000 /dev/zero > $d/f; done")
        assert code == 0, output
        assert not machine.runtime.oom_kills
        assert (await machine.runtime.stats(guest.id)).memory_bytes < 200 * MIB


async def test_fork_bomb_is_bounded(machine):
    async with machine.guest(max_processes=64) as guest, machine.guest(2) as neighbour:
        bomb = asyncio.create_task(guest.try_run("bomb() { bomb | bomb & }; bomb; sleep 4", timeout_s=30))
        await asyncio.sleep(3)
        stats = await machine.runtime.stats(guest.id)
        assert stats.processes <= 64 + AGENT_TASKS
        started = time.monotonic()
        assert await neighbour.run("echo fine") == "fine"
        assert time.monotonic() - started < 20
        await machine.runtime.destroy(guest.id)
        await bomb


@pytest.mark.parametrize("place", ["/workspace", "/root"])
async def test_full_disk_says_so_and_recovers(machine, place):
    size = 256
    async with machine.guest(disk_mib=size) as guest, machine.guest(2, disk_mib=64) as neighbour:
        code, output = await guest.try_run(f"cat /dev/zero > {place}/big")
        assert code != 0
        assert "No space left on device" in output
        written = int(await guest.run(f"stat -c %s {place}/big"))
        assert size * MIB * 0.999 <= written <= size * MIB * 1.05
        assert (await guest.try_run(f"head -c {2 * MIB} /dev/zero > {place}/more"))[0] != 0
        # The other place has its own room, and reading and removing work.
        other = "/root" if place == "/workspace" else "/workspace"
        await guest.run(f"head -c 50000000 /dev/zero > {other}/f && ls {place} && rm {place}/big {place}/more")
        code, output = await guest.try_run(f"head -c 200000000 /dev/zero > {place}/again")
        assert code == 0, output
        assert await neighbour.run("echo x > /workspace/x && cat /workspace/x") == "x"


async def test_full_disks_under_stress_do_not_stop_the_sandbox(machine):
    async with machine.guest(disk_mib=64, memory_mib=512) as guest:
        await guest.run("cat /dev/zero > /workspace/fill; cat /dev/zero > /root/fill; rm -rf /tmp/s")
        writers = []
        for number, folder in enumerate(("/workspace", "/root") * 3):
            script = STRESS.format(seconds=5, folder=folder)
            writers.append(guest.try_run(f"set -- {number}; {script}", timeout_s=60))
        codes = await asyncio.gather(*writers)
        assert [code for code, _ in codes] == [0] * 6
        code, output = await guest.try_run(
            "rm -rf /workspace/* /root/fill /root/[0-9]; sleep 0.5;"
            "echo ok > /root/a && echo ok > /workspace/a && cat /root/a"
        )
        assert (code, output) == (0, "ok")


async def test_sandbox_that_hides_its_hog_behind_a_huge_dump_is_ended(machine):
    async with machine.guest(memory_mib=512, max_processes=400) as guest, machine.guest(2) as neighbour:
        ended = asyncio.create_task(machine.runtime.wait(guest.id))
        fat = "export BIG=$(head -c 125000 /dev/zero | tr '\\0' x); for i in $(seq 260); do sleep 100 & done"
        await guest.try_run(f"{fat}; {HOG}", timeout_s=60)
        async with asyncio.timeout(60):
            assert "memory" in await ended
        assert await neighbour.run("echo fine") == "fine"
