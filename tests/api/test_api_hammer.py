"""Random verbs, deaths, outages and restarts at random points: states stay legal, nothing is left that no one owns."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from control_plane import Installation, Server, check_nothing_is_left
from cpuos.server.states import TRANSITIONS

EDGES = {(before.value, after.value) for before, verbs in TRANSITIONS.items() for after in verbs.values()}
SMALL = {"memory_mib": 128, "disk_mib": 64, "cpu": 1}


class Hammer:
    def __init__(self, installation: Installation, seed: int) -> None:
        self.installation = installation
        self.random = random.Random(seed)
        self.keys: list[str] = []
        self.runs = 0
        self.answers: dict[str, set[str]] = {}

    async def step(self, server: Server) -> None:
        node, gateway, chance = self.installation.node, self.installation.gateway, self.random
        records = (await server.http.get("/v1/sandboxes?state=all")).json()["sandboxes"]
        known = [one["id"] for one in records]
        fit = [one["id"] for one in records if one["state"] in ("running", "pausing", "paused", "resuming")] or known
        verbs = ["create"] * 6 + ["kill"] * 3 + ["die"] * 2 + ["update", "expire", "idle", "fork", "snapshot", "remove"]
        verbs += ["pause"] * 5 + ["resume"] * 3 + ["called"] * 2
        outages = ["node", "gateway", "gates"] if self.runs > 1 else []
        match chance.choice(verbs + outages):
            case "create":
                await self.create(server)
            case "kill" if known:
                await server.kill(chance.choice(known))
            case "pause" | "resume" as verb if known:
                await server.http.post(f"/v1/sandboxes/{chance.choice(fit)}/{verb}")
            case "called" if gateway.suspended:
                await gateway.call(chance.choice(list(gateway.suspended)))
            case "idle":
                gateway.idle_since = {one: None for one in chance.sample(known, len(known) // 2)}
            case "snapshot" if known:
                await server.http.post(f"/v1/sandboxes/{chance.choice(fit)}/snapshots", json={})
            case "fork" if known:
                body = {"count": chance.choice([1, 2])}
                await server.http.post(f"/v1/sandboxes/{chance.choice(fit)}/fork", json=body)
            case "remove" if node.snapshots_kept:
                await server.http.delete(f"/v1/snapshots/{chance.choice(list(node.snapshots_kept))}")
            case "die" if node.sandboxes:
                await node.die(chance.choice(list(node.sandboxes)))
            case "update" if known:
                body = {"timeout_s": chance.choice([1, 60, 900])}
                await server.http.patch(f"/v1/sandboxes/{chance.choice(known)}", json=body)
            case "expire":
                self.installation.clock.advance(chance.choice([1, 30, 600]))
            case "node":
                node.reachable = chance.random() < 0.7
            case "gateway":
                gateway.reachable = chance.random() < 0.7
            case "gates":
                for gate in (node.create_gate, node.answer_gate, gateway.attach_gate):
                    gate.clear() if chance.random() < 0.3 else gate.set()
                for verb in ("pause", "resume", "settle", "snapshot"):
                    node.gates[verb].close() if chance.random() < 0.2 else node.gates[verb].open()

    async def create(self, server: Server) -> None:
        if not self.keys or self.random.random() < 0.7:
            self.keys.append(f"key-{len(self.keys)}")
        key = self.random.choice(self.keys)
        name = self.random.choice([None, "a", "b"]) if key == self.keys[-1] else None
        body = {**SMALL, "labels": {"key": key}} | ({"name": name} if name else {})
        if key == self.keys[-1]:
            body |= self.random.choice([{}, {"idle_timeout_s": 30}, {"on_timeout": "pause"}, {"auto_resume": False}])
        answer = await server.create(key=key, **body)
        if answer.status_code == 201:
            self.answers.setdefault(key, set()).add(answer.json()["sandbox"]["id"])

    async def run(self, server: Server) -> None:
        """Some calls at once; the server is gone while some of them are under way."""
        self.runs += 1
        if self.random.random() < 0.7:
            self.mend()
        calls = []
        for _ in range(self.random.randint(20, 40)):
            calls.append(asyncio.create_task(self.step(server)))
            await asyncio.sleep(self.random.choice([0, 0, 0.002, 0.02]))
            if self.random.random() < 0.2 and calls:
                self.random.choice(calls).cancel()  # a client that goes away
        await asyncio.wait(calls, timeout=1.0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def mend(self) -> None:
        node, gateway = self.installation.node, self.installation.gateway
        node.reachable = gateway.reachable = True
        for gate in (node.create_gate, node.answer_gate, gateway.attach_gate):
            gate.set()
        for closed in node.gates.values():
            closed.open()


@pytest.mark.parametrize("seed", range(4))
async def test_hammer(installation: Installation, tmp_path: Path, seed: int) -> None:
    installation.node.capacity |= {"max_sandboxes": 12}
    hammer = Hammer(installation, seed)
    async with installation.serve():
        watch_states(tmp_path / "cpuos.db")
    for _ in range(4):
        async with installation.serve(reconcile=True, stop_grace_s=0, idempotency_wait_s=1) as server:
            await hammer.run(server)
    hammer.mend()
    async with installation.serve() as server:
        for _ in range(4):
            await server.settle()
            installation.clock.advance(31)
        await check_nothing_is_left(server)
    check_states(tmp_path / "cpuos.db")
    assert all(len(ids) == 1 for ids in hammer.answers.values()), "one key, one sandbox"


def watch_states(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(
            "CREATE TABLE seen (id, before, after);"
            "CREATE TRIGGER watch AFTER UPDATE OF state ON sandboxes BEGIN"
            " INSERT INTO seen VALUES (new.id, old.state, new.state); END"
        )


def check_states(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        seen = set(connection.execute("SELECT before, after FROM seen").fetchall())
    assert seen <= EDGES, seen - EDGES
    assert len(seen) >= 2, f"the hammer hit too little: {seen}"
