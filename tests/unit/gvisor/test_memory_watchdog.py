"""The watchdog over many sandboxes: one task, few descriptors; each is looked at in time."""

from __future__ import annotations

import asyncio
import os
import resource

import pytest

from cpuos.runtimes.descriptors import SELECT_LIMIT
from cpuos.runtimes.gvisor.watchdog import MemoryWatchdog
from cpuos.runtimes.limits import ControlGroups
from cpuos.runtimes.processes import find_process, open_process
from cpuos.testing.waiting import until

MANY = [f"{number:020}" for number in range(40)]
LIMIT = 100 << 20
KILLED = []


class Worker:
    """Chooses nobody, or whom it is told to; notes who was asked for."""

    def __init__(self):
        self.asked = []
        self.chosen = ()
        self.meanwhile = lambda: None

    async def choose(self, control):
        self.asked.append(control)
        self.meanwhile()
        return self.chosen


class Control:
    def __init__(self, sandbox_id):
        self.sandbox_id = sandbox_id

    def connect(self):
        return self.sandbox_id

    async def kill(self, pid):
        KILLED.append(pid)


@pytest.fixture
def groups(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory")
    for sandbox_id in MANY:
        group = tmp_path / "cpuos-abcdef" / sandbox_id
        group.mkdir(parents=True)
        (group / "memory.stat").write_text("file 0\nshmem 0\n")
        (group / "memory.events").write_text("low 0\noom_kill 0\n")
        (group / "memory.current").write_text(str(10 << 20).ljust(12))
    return ControlGroups("abcdef", root=tmp_path)


@pytest.fixture
async def watchdog(groups):
    worker = Worker()
    told = []
    watchdog = MemoryWatchdog(groups, worker=worker, on_kill=told.append)
    watchdog.worker, watchdog.told = worker, told
    KILLED.clear()
    yield watchdog
    await watchdog.close()


def watch_all(watchdog):
    for sandbox_id in MANY:
        watchdog.watch(sandbox_id, limit_bytes=LIMIT, control=Control(sandbox_id))


def use(tmp_path, sandbox_id, mib):
    with (tmp_path / "cpuos-abcdef" / sandbox_id / "memory.current").open("r+") as file:  # never empty meanwhile
        file.write(str(mib << 20).ljust(12))


async def test_the_one_over_its_threshold_is_relieved_and_no_other(tmp_path, watchdog):
    watch_all(watchdog)
    await asyncio.sleep(0)
    use(tmp_path, MANY[7], 90)
    await until(lambda: watchdog.worker.asked)
    use(tmp_path, MANY[7], 10)
    use(tmp_path, MANY[30], 95)
    await until(lambda: MANY[30] in watchdog.worker.asked)
    assert set(watchdog.worker.asked) == {MANY[7], MANY[30]}


async def test_it_is_looked_at_again_after_its_relief(tmp_path, watchdog):
    watch_all(watchdog)
    for _ in range(2):
        watchdog.worker.asked.clear()
        use(tmp_path, MANY[3], 90)
        await until(lambda: watchdog.worker.asked)
        use(tmp_path, MANY[3], 10)
        await asyncio.sleep(0.1)
        watchdog.worker.asked.clear()
        await asyncio.sleep(0.1)
        assert not watchdog.worker.asked


def host_kills(tmp_path, sandbox_id, number):
    with (tmp_path / "cpuos-abcdef" / sandbox_id / "memory.events").open("r+") as file:
        file.write(f"low 0\noom_kill {number}\n")


async def test_what_the_host_has_killed_is_told_once_though_nobody_saw_the_memory(tmp_path, watchdog):
    watch_all(watchdog)
    await asyncio.sleep(0.1)
    host_kills(tmp_path, MANY[5], 2)
    await until(lambda: watchdog.told)
    await asyncio.sleep(0.5)
    [kill] = watchdog.told
    assert (kill.sandbox_id, kill.pids, kill.whole) == (MANY[5], (), False)
    assert (watchdog.worker.asked, KILLED) == ([], [])


@pytest.mark.parametrize("faster", ["the host", "the process"])
async def test_nobody_is_killed_when_the_memory_is_there_again(tmp_path, watchdog, faster):
    """What had it was gone before the worker chose, so the one that it chose is another."""

    def meanwhile():
        use(tmp_path, MANY[5], 10)
        if faster == "the host":
            host_kills(tmp_path, MANY[5], 1)

    watchdog.worker.chosen, watchdog.worker.meanwhile = (39, 1), meanwhile
    watch_all(watchdog)
    use(tmp_path, MANY[5], 90)
    await until(lambda: watchdog.worker.asked)
    await asyncio.sleep(0.5)
    assert KILLED == []
    assert [kill.pids for kill in watchdog.told] == ([()] if faster == "the host" else [])


async def test_the_one_that_was_chosen_is_killed(tmp_path, watchdog):
    watchdog.worker.chosen = (39, 1)
    watch_all(watchdog)
    use(tmp_path, MANY[5], 90)
    await until(lambda: KILLED)
    use(tmp_path, MANY[5], 10)
    assert (KILLED[0], watchdog.told[0].pids) == (39, (39, 1))


async def test_many_take_one_task(watchdog):
    before = len(asyncio.all_tasks())
    watch_all(watchdog)
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) == before + 1


async def test_what_it_holds_is_let_go(watchdog):
    before = set(os.listdir("/proc/self/fd"))
    watch_all(watchdog)
    for sandbox_id in MANY[:-1]:
        await watchdog.unwatch(sandbox_id)
        await watchdog.unwatch(sandbox_id)
    await watchdog.close()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_descriptors_of_each_sandbox_are_out_of_the_way(watchdog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 2 * SELECT_LIMIT:
        pytest.skip("this process may not have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        before = set(os.listdir("/proc/self/fd"))
        watch_all(watchdog)
        pidfd = open_process(find_process(os.getpid()))
        new = {int(number) for number in set(os.listdir("/proc/self/fd")) - before}
        os.close(pidfd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pidfd in new
    assert min(new) >= SELECT_LIMIT
