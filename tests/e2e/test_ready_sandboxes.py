"""Ready sandboxes through the public SDK, real ones: who takes one gets an ordinary sandbox that nobody has had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpuos import Client, Sandbox
from cpuos.services.health import ask
from cpuos.testing.instance import Instance
from cpuos.types.sandbox import StartedFrom

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

SHAPE = {"cpu": 1, "memory": "256MiB", "disk": "64MiB"}
KEPT = 4
# What two sandboxes must never have in common, and what a fresh one has nothing of.
OWN = (
    "cat /proc/sys/kernel/hostname; cat /etc/machine-id 2>/dev/null || echo none; cat /proc/sys/kernel/random/uuid; "
    "python3 -c 'import random, uuid; print(random.random(), uuid.uuid4())'; "
    "python3 -c 'import os; print(os.urandom(8).hex())'"
)


@pytest.fixture(scope="module")
def pooled() -> Iterator[Instance]:
    with Instance(
        runtime="gvisor", pool_memory_mib=512, pool_keep=[f"python@1x256x64={KEPT}"], max_sandboxes=12
    ) as instance:
        yield instance


@pytest.fixture(scope="module")
def client(pooled: Instance) -> Client:
    return pooled.client()


def wait_ready(pooled: Instance, count: int = KEPT, *, snapshot: str | None = None) -> list[str]:
    """Ids of those that are ready, once there are so many."""
    deadline = time.monotonic() + 120
    while True:
        _, pool = ask(pooled.settings.node_socket, "/v1/pool", timeout_s=30)
        ids = [one["id"] for one in pool["ready"] if one["snapshot"] == snapshot]
        if len(ids) >= count:
            return ids
        assert time.monotonic() < deadline, pool
        time.sleep(0.05)


def test_it_is_taken_and_says_so(pooled: Instance, client: Client) -> None:
    ready = wait_ready(pooled)
    time.sleep(1)  # the server has heard of them
    with Sandbox.create(client=client, **SHAPE) as sandbox:
        assert sandbox.id in ready
        assert sandbox.started_from is StartedFrom.POOL
        assert sandbox.exec(["hostname"], check=True).stdout.strip() == sandbox.id
        assert sandbox.files.list("/workspace") == []
        assert sandbox.exec("id -un; pwd", check=True).stdout.split() == ["user", "/workspace"]
        entry = client.get_json(f"/v1/audit?sandbox={sandbox.id}")["entries"]
        assert any(one["detail"].get("started_from") == "pool" for one in entry)


def test_those_that_are_ready_are_nobody_s(pooled: Instance, client: Client) -> None:
    ready = wait_ready(pooled)
    listed = {one.id for one in Sandbox.list(client=client, state="all")}
    assert not listed & set(ready)
    capacity = client.get_json("/v1/capacity")
    assert capacity["sandboxes"]["reserved"] == 0
    (node,) = client.get_json("/v1/nodes")["nodes"]
    assert node["pool"]["ready"] >= KEPT
    assert not any(one in str(node) for one in ready)
    for one in ready:
        with pytest.raises(Exception, match="cannot find sandbox"):
            Sandbox.connect(one, client=client)


def test_siblings_share_nothing_of_their_own(pooled: Instance, client: Client) -> None:
    wait_ready(pooled)
    time.sleep(1)
    with ThreadPoolExecutor(KEPT) as callers:
        made = list(callers.map(lambda _: Sandbox.create(client=client, **SHAPE), range(KEPT)))
    try:
        assert [one.started_from for one in made] == [StartedFrom.POOL] * KEPT
        assert len({one.id for one in made}) == KEPT
        told = [one.exec(OWN, check=True).stdout.splitlines() for one in made]
        for line in zip(*told, strict=True):
            assert len(set(line)) == KEPT or set(line) == {"none"}, line
        made[0].files.write("/workspace/secret", b"mine")
        assert all(one.files.list("/workspace") == [] for one in made[1:])
    finally:
        for one in made:
            one.kill()


def test_an_idle_time_counts_from_the_create(pooled: Instance, client: Client) -> None:
    wait_ready(pooled)
    time.sleep(3)
    with Sandbox.create(client=client, idle_timeout="2s", on_idle="kill", **SHAPE) as sandbox:
        assert sandbox.started_from is StartedFrom.POOL
        assert sandbox.exec(["true"]).exit_code == 0
        time.sleep(1)
        assert sandbox.refresh().state == "running"


def test_a_killed_node_keeps_what_is_ready_and_what_was_taken(pooled: Instance, client: Client) -> None:
    before = wait_ready(pooled)
    time.sleep(1)
    with Sandbox.create(client=client, **SHAPE) as taken:
        pooled.kill("node")
        pooled.wait_ready()
        after = wait_ready(pooled, KEPT - 1)
        assert len(set(before) & set(after)) >= KEPT - 1
        assert taken.exec(["echo", "on"], check=True).stdout == "on\n"
        with Sandbox.create(client=client, **SHAPE) as another:
            assert another.exec(["true"]).exit_code == 0


def test_a_killed_server_and_gateway_find_them_again(pooled: Instance, client: Client) -> None:
    for part in ("server", "gateway"):
        wait_ready(pooled)
        pooled.kill(part)
        pooled.wait_ready()
        time.sleep(1)
        with Sandbox.create(client=client, **SHAPE) as sandbox:
            assert sandbox.started_from is StartedFrom.POOL
            assert sandbox.exec(["echo", part], check=True).stdout == f"{part}\n"
            with Sandbox.create(client=client, name=f"of-{part}", **SHAPE) as named:
                assert named.started_from is StartedFrom.COLD
                assert named.exec(["hostname"], check=True).stdout.strip() == f"of-{part}"


def test_a_snapshot_that_is_asked_for_is_ready_too(pooled: Instance, client: Client) -> None:
    """Its processes go on in each, told apart before they run."""
    counting = (
        "import random, time\nwhile True:\n    open('/tmp/n', 'w').write(str(random.random()))\n    time.sleep(.05)"
    )
    with Sandbox.create(client=client, **SHAPE) as origin:
        origin.spawn(["python3", "-c", counting])
        while not origin.exec("cat /tmp/n").stdout:
            time.sleep(0.05)
        snapshot = origin.snapshot()
    with Sandbox.create(client=client, snapshot=snapshot) as first:
        assert first.started_from is StartedFrom.RESTORE
    ready = wait_ready(pooled, 1, snapshot=snapshot.id)
    time.sleep(1)
    with Sandbox.create(client=client, snapshot=snapshot) as second:
        assert (second.id, second.started_from) == (ready[0], StartedFrom.POOL)
        assert second.exec(["hostname"], check=True).stdout.strip() == second.id
        seen = second.exec("cat /tmp/n; sleep .3; echo; cat /tmp/n", check=True).stdout.split()
        assert seen[0] != seen[1]
    snapshot.delete()
    with pytest.raises(Exception, match="cannot find snapshot"):
        Sandbox.create(client=client, snapshot=snapshot.id)


def test_nothing_is_left_of_them_but_those_that_are_ready(pooled: Instance) -> None:
    wait_ready(pooled)
    deadline = time.monotonic() + 60
    while left := pooled.leftovers():  # one may be being made
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
