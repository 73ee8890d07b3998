"""kill -9 of each part at random points under load: nothing lost but what died, states legal, nothing left."""

from __future__ import annotations

import hashlib
import random
import threading
import time

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import CpuosError, SandboxGone

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(400)]


def wait_for_no_leftovers(instance) -> None:
    """A death is told first; what the sandbox had on the host goes a moment later."""
    deadline = time.monotonic() + 60
    while instance.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert instance.leftovers() == []


LEGAL = {"creating", "running", "stopping", "stopped", "failed", "lost"}


@pytest.mark.parametrize("part", ["server", "gateway", "node"])
def test_a_part_dies_under_load(instance, client: Client, part: str) -> None:
    lines = 3000
    program = f"import time\nfor i in range({lines}):\n  print(i, flush=True)\n  time.sleep(0.001)"
    dice = random.Random(part)
    with Sandbox.create(client=client, memory="1GiB", disk="512MiB", timeout="10m") as sandbox:
        job = sandbox.spawn(["python3", "-c", program])
        written: dict[str, str] = {}
        stop = threading.Event()

        def write_files() -> None:
            number = 0
            while not stop.is_set():
                data = dice.randbytes(20_000)
                try:
                    sandbox.files.write(f"load/{number}", data)
                except CpuosError:
                    continue  # refused or cut is fine; said and lost is not
                written[f"load/{number}"] = hashlib.sha256(data).hexdigest()
                number += 1

        writer = threading.Thread(target=write_files)
        writer.start()
        try:
            for _ in range(3):
                time.sleep(dice.uniform(0.2, 1.2))
                instance.kill(part)
                instance.wait_ready()
        finally:
            stop.set()
            writer.join(60)
        result = job.wait(timeout=120)
        assert (result.status, result.exit_code) == ("exited", 0), result
        assert result.stdout == "".join(f"{number}\n" for number in range(lines))
        assert written
        for path, digest in written.items():
            assert hashlib.sha256(sandbox.files.read(path)).hexdigest() == digest
        assert Sandbox.connect(sandbox.id, client=client).state == "running"
    assert {box.state.value for box in Sandbox.list(state="all", client=client)} <= LEGAL
    wait_for_no_leftovers(instance)


def test_a_sandbox_dies_under_load(instance, client: Client) -> None:
    with Sandbox.create(client=client, memory="1GiB", disk="512MiB") as sandbox:
        job = sandbox.spawn("for i in $(seq 20); do echo $i; sleep 0.05; done; sleep 100")
        while len(job.output(offset=0)) < 51:
            time.sleep(0.1)
        instance.kill_sandbox(sandbox.id)
        with pytest.raises(SandboxGone):
            job.wait(timeout=60)
        assert job.refresh().status == "sandbox_lost"
        assert job.output() == b"".join(b"%d\n" % number for number in range(1, 21))
        again = Sandbox.connect(sandbox.id, client=client)
        assert again.state == "lost"
        assert again.info.reason
    wait_for_no_leftovers(instance)


def test_parts_die_while_sandboxes_are_made(instance, client: Client) -> None:
    dice = random.Random(5)
    made: list[str] = []

    def create() -> None:
        for _ in range(4):
            try:
                box = Sandbox.create(
                    client=client, template="base", memory="256MiB", disk="64MiB", cpu=1, timeout="60s"
                )
            except CpuosError:
                continue
            made.append(box.id)

    workers = [threading.Thread(target=create) for _ in range(2)]
    for worker in workers:
        worker.start()
    for part in ("node", "server", "gateway"):
        time.sleep(dice.uniform(0.1, 0.5))
        instance.kill(part)
        instance.wait_ready()
    for worker in workers:
        worker.join(120)
    for box in Sandbox.list(client=client):
        if box.state.value in {"creating", "running"}:
            Sandbox.connect(box.id, client=client).kill()
    wait_for_no_leftovers(instance)
    assert {box.state.value for box in Sandbox.list(state="all", client=client)} <= {"stopped", "failed", "lost"}
