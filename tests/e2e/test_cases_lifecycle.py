"""Cases of pause and resume on real sandboxes: C08, C12, C13, C15, C23 while paused; and deaths of parts meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from cpuos import AsyncClient, AsyncSandbox, Client, Sandbox, Snapshot
from cpuos.errors import Conflict, CpuosError, LimitReached, NotFound, SandboxGone, Unavailable
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from cpuos.types.sandbox import SandboxState

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(600)]
SMALL = {"template": "base", "memory": "128MiB", "disk": "64MiB", "cpu": 1, "timeout": "30m", "max_processes": 32}


def is_in(sandbox: Sandbox, state: SandboxState) -> Callable[[], bool]:
    return lambda: sandbox.refresh().state is state


def seed_of(name: str) -> random.Random:
    """Another one each run; printed, so that a failure can be had again."""
    seed = int(os.environ.get("CPUOS_TESTING_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{name}: CPUOS_TESTING_SEED={seed}")
    return random.Random(seed)


# C08


def test_c08_a_silent_command_outlives_the_idle_time(client: Client) -> None:
    with Sandbox.create(client=client, idle_timeout=2, **SMALL) as sandbox:
        result = sandbox.exec("sleep 8; echo fin", timeout=60)
        assert result.stdout == "fin\n"
        assert paused_so_far(client, sandbox) == 0
        wait_until(is_in(sandbox, SandboxState.PAUSED))
        assert sandbox.info.reason == "idle for 2 s"


def test_c08_a_job_without_a_client_too(instance: Instance, client: Client) -> None:
    with Sandbox.create(client=client, idle_timeout=2, **SMALL) as sandbox:
        other = instance.client()
        job = Sandbox.connect(sandbox.id, client=other).spawn("sleep 8; echo fin > /workspace/fin")
        other.close()  # nobody listens any more
        wait_until(is_in(sandbox, SandboxState.PAUSED))
        assert sandbox.files.read("fin") == b"fin\n"
        assert sandbox.commands.get(job.id).refresh().exit_code == 0


def test_c08_an_open_terminal_keeps_it(client: Client) -> None:
    with Sandbox.create(client=client, idle_timeout=1, **SMALL) as sandbox:
        with sandbox.pty("cat") as terminal:
            time.sleep(4)  # time itself is what is tested
            assert paused_so_far(client, sandbox) == 0
            terminal.send(b"x\n")
        wait_until(is_in(sandbox, SandboxState.PAUSED))


def paused_so_far(client: Client, sandbox: Sandbox) -> int:
    entries = client.get_json("/v1/audit", sandbox=sandbox.id, action="sandbox.pause")["entries"]
    return len([entry for entry in entries if entry["phase"] == "outcome"])


# C12


def test_c12_files_survive_ten_rounds(client: Client) -> None:
    """By call and by idle time, without sync, in /workspace and all over the root."""
    options = {**SMALL, "memory": "256MiB", "disk": "512MiB", "idle_timeout": 1}
    folders = "/workspace /home/user /etc/x /usr/local/x /tmp/x"
    with Sandbox.create(client=client, **options) as sandbox:
        sandbox.exec(f"mkdir -p {folders}", user="root", check=True)
        for number in range(1, 11):
            sandbox.exec(
                f"for d in {folders}; do dd if=/dev/urandom of=$d/{number} bs=1M count=1 status=none; done;"
                f"for d in {folders}; do sha256sum $d/[0-9]*; done > /workspace/sums",
                user="root",
                check=True,
            )
            if number % 2:
                sandbox.pause()
            else:
                wait_until(is_in(sandbox, SandboxState.PAUSED))
            again = Sandbox.connect(sandbox.id, client=client)
            told = again.exec("sha256sum --quiet -c /workspace/sums && wc -l < /workspace/sums", user="root")
            assert (told.exit_code, told.stdout.strip()) == (0, str(5 * number)), told


# C13


class Hammer:
    """Four clients at one set of sandboxes; each call ends with a result or with an error that says why."""

    FINE = (Conflict, LimitReached, SandboxGone, Unavailable, NotFound)

    def __init__(self, dice: random.Random, sandboxes: int) -> None:
        self.dice = dice
        self.room = asyncio.Semaphore(6)  # of callers: more would only wait for this machine
        self.ids: list[str] = []
        self.wanted = sandboxes
        self.told: dict[str, int] = {}
        self.killed: set[str] = set()
        self.whats: set[str] = set()

    async def round(self, client: AsyncClient, sandbox_id: str) -> None:
        verb = self.dice.choices(["pause", "resume", "exec", "snapshot", "kill"], [6, 6, 8, 1, 0.3])[0]
        async with self.room:
            try:
                box = await AsyncSandbox.connect(sandbox_id, client=client)
                await self.act(box, verb)
            except self.FINE as error:
                self.whats.add(error.what)
                self.told[f"{verb}: {error.code}"] = self.told.get(f"{verb}: {error.code}", 0) + 1
            else:
                self.told[verb] = self.told.get(verb, 0) + 1

    async def resume_all(self, client: AsyncClient) -> None:
        for info in await AsyncSandbox.list(client=client, state="paused"):
            with suppress(*self.FINE):
                await (await AsyncSandbox.connect(info.id, client=client)).resume()

    async def act(self, box: AsyncSandbox, verb: str) -> None:
        match verb:
            case "exec":
                text = str(self.dice.random())
                result = await box.exec(f"echo {text} | tee -a /workspace/log", timeout=120)
                if result.status == "exited":
                    assert result.stdout == f"{text}\n"
            case "snapshot":
                await (await box.snapshot()).delete()
            case "kill":
                self.killed.add(box.id)
                await box.kill()
            case _:
                await getattr(box, verb)()


@pytest.mark.parametrize(
    ("sandboxes", "rounds"), [(8, 12), pytest.param(20, 30, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
async def test_c13_hammer(sandboxes: int, rounds: int) -> None:
    hammer = Hammer(seed_of("C13"), sandboxes)
    with Instance(runtime="gvisor", max_sandboxes=sandboxes, cpu_overcommit=64) as instance:
        clients = [instance.async_client() for _ in range(4)]
        made = await asyncio.gather(*(AsyncSandbox.create(client=clients[0], **SMALL) for _ in range(sandboxes)))
        hammer.ids = [one.id for one in made]
        calls = [(client, one) for one in hammer.ids for client in hammer.dice.choices(clients, k=rounds)]
        hammer.dice.shuffle(calls)
        rounds_done = asyncio.gather(*(hammer.round(client, one) for client, one in calls))
        while not (await asyncio.wait({rounds_done}, timeout=1))[0]:
            # One whose command ran as another client paused it waits until somebody resumes it.
            await hammer.resume_all(clients[0])
        await rounds_done
        print(hammer.told)
        for info in await AsyncSandbox.list(client=clients[0], state="all"):
            assert (info.state.value in ("running", "paused")) is (info.id not in hammer.killed), info
        for one in hammer.ids:
            await (await AsyncSandbox.connect(one, client=clients[0])).kill()
        assert await AsyncSandbox.list(client=clients[0]) == []
        capacity = await clients[0].get_json("/v1/capacity")
        assert {amount["reserved"] for amount in capacity.values()} == {0}
        for client in clients:
            await client.close()
        await asyncio.to_thread(wait_until, lambda: instance.leftovers() == [])
    assert all(what.startswith("cannot ") for what in hammer.whats), hammer.whats
    assert hammer.told.get("exec", 0) > 0 < hammer.told.get("pause", 0)


# C15


@pytest.mark.parametrize("paused_s", [3, pytest.param(90, marks=pytest.mark.slow)])
def test_c15_clock(client: Client, paused_s: float) -> None:
    with Sandbox.create(client=client, **SMALL) as sandbox:
        sandbox.pause()
        time.sleep(paused_s)  # time itself is what is tested
        sandbox.resume()
        before = time.time()
        told = float(sandbox.exec("date +%s.%N", check=True).stdout)
        assert before - 0.5 < told < time.time() + 0.5
        script = (
            "touch new; s=$(date +%s%N); sleep 2; e=$(date +%s%N); echo $(( (e - s) / 1000000 )); find new -mmin -1"
        )
        since = time.monotonic()
        slept, found = sandbox.exec(script, check=True).stdout.split()
        assert 1900 < int(slept) < 1000 * (time.monotonic() - since) + 100
        assert found == "new"


# C23


def test_c23_a_full_disk_can_be_paused(client: Client) -> None:
    with Sandbox.create(client=client, **{**SMALL, "disk": "128MiB"}) as sandbox:
        filled = sandbox.exec("dd if=/dev/zero of=/workspace/full bs=1M", timeout=120)
        assert "No space left" in filled.stderr
        digest = sandbox.exec("sha256sum /workspace/full", check=True).stdout
        sandbox.pause()
        sandbox.resume()
        assert sandbox.exec("sha256sum /workspace/full", check=True).stdout == digest
        with pytest.raises(CpuosError) as caught:
            sandbox.files.write("more", b"x" * (8 << 20))
        assert caught.value.code == "disk_full"
        snapshot = sandbox.snapshot()
        sandbox.files.remove("full")
        sandbox.files.write("more", b"x" * (8 << 20))
        with Sandbox.create(snapshot=snapshot, client=client) as other:
            assert other.exec("sha256sum /workspace/full", check=True).stdout == digest
        snapshot.delete()


# deaths


@contextmanager
def a_death(instance: Instance, part: str, *, after_s: float) -> Iterator[None]:
    """The part is killed so long after the block began."""
    timer = threading.Timer(after_s, lambda: instance.kill(part))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_files_of_a_sandbox_that_dies_are_kept(instance: Instance, client: Client) -> None:
    """Without sync: what was written lies on its disk image, and begins another sandbox."""
    with Sandbox.create(client=client, **SMALL) as sandbox:
        digest = sandbox.exec("head -c 5000000 /dev/urandom | tee data | sha256sum", check=True).stdout.split()[0]
        instance.kill_sandbox(sandbox.id)
        wait_until(is_in(sandbox, SandboxState.LOST))
        (kept,) = wait_until(lambda: Snapshot.list(sandbox=sandbox.id, client=client))
        assert kept.reason.startswith("kept when its sandbox was lost: ")
        with Sandbox.create(snapshot=kept.id, client=client) as other:
            assert other.exec("sha256sum data", check=True).stdout.split()[0] == digest
            assert other.info.reason == "began without the files outside of /workspace"
        Snapshot.get(kept.id, client=client).delete()
    wait_until(lambda: instance.leftovers() == [], within_s=60)


@pytest.mark.parametrize("part", ["server", "gateway", "node"])
def test_a_part_dies_while_sandboxes_are_paused_and_resumed(instance: Instance, client: Client, part: str) -> None:
    """Each ends in a state that is true, and no byte that was written is gone."""
    dice = seed_of(f"death of {part}")
    with Sandbox.create(client=client, **SMALL) as sandbox:
        data = dice.randbytes(200_000)
        sandbox.files.write("data", data)
        job = sandbox.spawn("n=0; while true; do n=$((n+1)); echo $n; sleep 0.05; done")
        for _ in range(4):
            with a_death(instance, part, after_s=dice.uniform(0, 0.8)):
                for verb in ("pause", "resume"):
                    with suppress(CpuosError):  # it may fail; what is then said of the sandbox must be true
                        getattr(sandbox, verb)()
            instance.wait_ready(timeout_s=60)
            wait_until(lambda: sandbox.refresh().state in (SandboxState.RUNNING, SandboxState.PAUSED), within_s=60)
            assert hashlib.sha256(sandbox.files.read("data")).digest() == hashlib.sha256(data).digest()
            before = job.output().count(b"\n")
            wait_until(lambda before=before: job.output().count(b"\n") > before)
        numbers = job.output().decode().split()
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    wait_until(lambda: instance.leftovers() == [], within_s=60)
