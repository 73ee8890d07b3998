"""The real agent in real sandboxes: frozen, saved, and gone on as itself and as others."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import shutil
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpuos.errors import CpuosError
from cpuos.gateway.agent.client import AgentClient
from cpuos.node.identity import NodeIdentity, load_identity
from cpuos.settings import load_settings
from cpuos.testing.waiting import until

pytestmark = pytest.mark.gvisor

# Answers each connection with a line.
LISTENER = (
    "exec perl -MIO::Socket::INET -e '$|=1; $s = IO::Socket::INET->new(Listen => 5, ReuseAddr => 1,"
    'LocalAddr => "127.0.0.1", LocalPort => 3000) or die; print "up\\n";'
    'while ($c = $s->accept) { print $c "hi\\n"; close $c }\''
)
FREEZE, FREEZE_2 = "f" * 32, "0" * 32


class Dialler:
    """Plays the node's dial socket for one sandbox, whose statement the test words."""

    def __init__(self, machine: Any, identity: NodeIdentity) -> None:
        self._machine, self._identity = machine, identity
        self.words: dict[str, Any] = {"incarnation": 0}
        self.key = secrets.token_bytes(32)

    def renew(self, **words: Any) -> None:
        self.words, self.key = words, secrets.token_bytes(32)

    async def dial(self, sandbox_id: str, generation: int) -> Any:
        made = asyncio.ensure_future(self._machine.slots.guest_link(sandbox_id))
        try:
            link = await asyncio.shield(made)
        except asyncio.CancelledError:
            (await made).socket.close()
            raise
        signed = self._identity.sign_statement(
            sandbox_id, generation, session_key=self.key, hostname=f"box-{sandbox_id[-2:]}", **self.words
        )
        return SimpleNamespace(
            socket=link.socket,
            address=link.address,
            statement=signed.statement,
            signature=signed.signature,
            session_key=self.key,
        )


class Agent:
    """The agent of one sandbox, spoken to as the gateway does."""

    def __init__(self, sandbox_id: str, dialler: Dialler) -> None:
        self.dialler = dialler
        self._sandbox_id = sandbox_id
        self._client = self._new()
        self._commands = 0

    def _new(self) -> AgentClient:
        return AgentClient(self.dialler, sandbox_id=self._sandbox_id, generation=1)

    async def identify(self) -> Any:
        await self._client.aclose()
        self._client = self._new()
        return await self._client.identify(wait_s=10)

    async def call(self, method: str, target: str, body: Any = None) -> Any:
        sent = b"" if body is None else json.dumps(body).encode()
        return json.loads(await self._client.call(method, target, what=f"cannot {method} {target}", body=sent))

    async def spawn(self, command: str | None, **more: Any) -> str:
        self._commands += 1
        command_id = f"{self._sandbox_id[-4:]}{self._commands:012d}"
        body = {"command": command, "cwd": "/", "user": "root", "attach": False} | more
        await self.call("POST", f"/v1/commands?id={command_id}", body)
        return command_id

    async def run(self, command: str, **more: Any) -> str:
        """A command's output, by way of a file."""
        command_id = await self.spawn(f"({command}) > /tmp/out 2>&1", **more)

        async def ended() -> bool:
            return (await self.call("GET", f"/v1/commands/{command_id}"))["status"] != "running"

        await until(ended)
        return (await self._client.call("GET", "/v1/files?path=/tmp/out&user=root", what="cannot read")).decode()

    async def freeze(self, freeze: str = FREEZE) -> Any:
        told = await self.call("POST", "/v1/freeze", {"freeze": freeze})
        await self._client.aclose()
        return told

    async def close(self) -> None:
        await self._client.aclose()


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go") or "/usr/local/go/bin/go"
    if not Path(go).exists():
        pytest.skip("the guest agent needs Go to build")
    folder = tmp_path_factory.mktemp("agent")
    cache = load_settings().cache_dir / "go"
    environment = {"PATH": "/usr/bin:/bin", "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
    environment |= {"GOCACHE": str(cache / "build"), "GOMODCACHE": str(cache / "mod"), "GOPATH": str(cache / "path")}
    source = Path(__file__).parents[3] / "guest"
    subprocess.run([go, "build", "-o", folder / "cpuos-agent", "."], cwd=source, check=True, env=environment)
    folder.chmod(0o755)
    return folder


@pytest.fixture
def rig(machine: Any, agent_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    identity = load_identity(tmp_path / "identity.key")

    @asynccontextmanager
    async def agent_of(number: int, *, image: Path | None = None, words: dict[str, Any] | None = None, **changes: Any):
        spec = await machine.prepare(number, agent=agent_folder, node_public_key=identity.public_key, **changes)
        try:
            start = machine.runtime.start(spec) if image is None else machine.runtime.restore(spec, image=image)
            await start
            dialler = Dialler(machine, identity)
            if words is not None:
                dialler.renew(**words)
            agent = Agent(spec.id, dialler)
            try:
                yield SimpleNamespace(agent=agent, spec=spec, hello=await agent.identify())
            finally:
                await agent.close()
        finally:
            await machine.take_away(spec.id)

    return agent_of


def _thaw(incarnation: int, freeze: str = FREEZE, *, of: str | None = None) -> dict[str, Any]:
    return {"incarnation": incarnation, "thaw": freeze, "frozen_as": of}


async def test_a_sandbox_goes_on_where_it_froze(machine, rig, tmp_path):
    async with rig(1) as first:
        agent, image = first.agent, tmp_path / "image"
        counter = await agent.spawn("n=0; while :; do n=$((n+1)); echo $n; sleep 0.01; done")
        server = await agent.spawn(LISTENER)
        await until(lambda: _told(agent, counter))
        await until(lambda: _told(agent, server))
        told = await agent.freeze()
        assert {"port": 3000, "address": "127.0.0.1"} in told["listeners"]
        assert all(one["port"] != 1 for one in told["listeners"])
        assert set(told["commands"]) == {counter, server}
        assert told["processes"] >= 2  # and a sleep, unless it is between two
        await machine.runtime.checkpoint(first.spec.id, image=image)
        agent.dialler.renew(**_thaw(1))
        hello = await agent.identify()
        assert (hello.incarnation, hello.frozen) == (1, None)
        assert hello.thawed.continued == told["processes"]
        bytes_then = (await agent.call("GET", f"/v1/commands/{counter}"))["stdout_bytes"]
        await until(lambda: _told(agent, counter, more_than=bytes_then))
        await agent.close()
        await machine.runtime.destroy(first.spec.id)
        await machine.slots.release(first.spec.id)
        netns = await machine.slots.take(first.spec.id)
        await machine.runtime.restore(dataclasses.replace(first.spec, netns=netns), image=image)
        agent.dialler.renew(**_thaw(2))
        hello = await agent.identify()
        assert (hello.incarnation, hello.commands) == (2, 2)
        assert hello.thawed.continued == told["processes"]
        await until(lambda: _told(agent, counter, more_than=bytes_then))
        assert await agent.run("exec 3<>/dev/tcp/127.0.0.1/3000; cat <&3") == "hi\n"


async def test_copies_are_told_who_they_are(machine, rig, tmp_path):
    async with rig(1) as first:
        agent, image = first.agent, tmp_path / "image"
        await agent.run(
            "mkdir -p /etc/cpuos/reseed.d; echo old > /etc/machine-id;"
            "printf '#!/bin/sh\necho $CPUOS_SANDBOX > /tmp/reseeded\n' > /etc/cpuos/reseed.d/hook;"
            "chmod +x /etc/cpuos/reseed.d/hook; sync"
        )
        counter = await agent.spawn("while :; do echo >> /tmp/count; sleep 0.01; done")
        told = await agent.freeze()
        await machine.runtime.checkpoint(first.spec.id, image=image)
        facts = []
        for number in (2, 3):
            words = _thaw(0, of=first.spec.id)
            async with rig(number, image=image, words=words) as copy:
                assert (copy.hello.sandbox, copy.hello.commands, copy.hello.frozen) == (copy.spec.id, 0, None)
                assert copy.hello.thawed.continued == told["processes"]
                assert copy.hello.thawed.reseeded == ["hook"]
                assert (await agent_codes(copy.agent, f"/v1/commands/{counter}")) == "command_not_found"
                size = "stat -c %s /tmp/count"
                before = int(await copy.agent.run(size))
                await until(lambda agent=copy.agent, before=before: _grows(agent, before))
                facts.append(await copy.agent.run("cat /tmp/reseeded /etc/machine-id; hostname"))
                assert facts[-1].splitlines()[0] == copy.spec.id
                assert facts[-1].splitlines()[2] == f"box-{number}"
        machines = {lines.splitlines()[1] for lines in facts}
        assert len(machines) == 2
        assert "old" not in machines
        agent.dialler.renew(**_thaw(1))
        await agent.identify()
        assert (await agent.run("cat /etc/machine-id")) == "old\n"
        await until(lambda: _grows(agent, 0))


async def test_a_shell_and_what_was_stopped_see_nothing_of_it(machine, rig, tmp_path):
    async with rig(1) as first:
        agent, image = first.agent, tmp_path / "image"
        shell = await agent.spawn(None, argv=["/bin/bash", "--norc", "-i"], pty={"cols": 80, "rows": 24}, stdin="open")
        stopped = await agent.spawn("echo $$ > /tmp/stopped; while :; do echo; sleep 0.01; done")
        await until(lambda: _told(agent, stopped))
        await agent.run("kill -STOP $(cat /tmp/stopped)")
        bytes_then = (await agent.call("GET", f"/v1/commands/{stopped}"))["stdout_bytes"]
        for incarnation in range(1, 4):
            freeze = f"{incarnation:032x}"
            await agent.freeze(freeze)
            if incarnation == 2:
                await machine.runtime.checkpoint(first.spec.id, image=image)
            agent.dialler.renew(**_thaw(incarnation, freeze))
            await agent.identify()
        assert (await agent.call("GET", f"/v1/commands/{stopped}"))["stdout_bytes"] == bytes_then
        assert "T" in await agent.run("ps -o stat= -p $(cat /tmp/stopped)")
        assert (await agent.call("GET", f"/v1/commands/{shell}"))["status"] == "running"
        await agent.run("kill -CONT $(cat /tmp/stopped)")
        await until(lambda: _told(agent, stopped, more_than=bytes_then))


async def test_a_fork_bomb_is_frozen_and_saved(machine, rig, tmp_path):
    async with rig(1) as first:
        agent, image = first.agent, tmp_path / "image"
        bomb = await agent.spawn("exec perl -e 'while (1) { fork; select undef, undef, undef, 0.01 }'", user="user")
        await until(lambda: _crowded(machine, first.spec.id))
        told = await agent.freeze()
        assert told["processes"] >= 30
        await machine.runtime.checkpoint(first.spec.id, image=image)
        agent.dialler.renew(**_thaw(1))
        hello = await agent.identify()
        assert hello.thawed.continued >= 30
        await agent.call("POST", f"/v1/commands/{bomb}/kill", {})


async def test_programs_that_start_programs_by_vfork_are_frozen_often(machine, rig):
    """A parent cannot stop before its child runs a program; a freeze right after a thaw takes nobody for stopped."""
    image = load_settings().template_dir / "python" / "root.erofs"
    if not image.exists():
        pytest.skip("needs the python template")
    machine.image = image.resolve()
    async with rig(1) as first:
        agent = first.agent
        program = "import subprocess\nwhile 1: subprocess.run(['/bin/true']); print(flush=True)"
        started = [await agent.spawn(None, argv=["python3", "-c", program]) for _ in range(3)]
        for command_id in started:
            await until(lambda command_id=command_id: _told(agent, command_id))
        for incarnation in range(1, 60):
            freeze = f"{incarnation:032x}"
            await agent.freeze(freeze)
            agent.dialler.renew(**_thaw(incarnation, freeze))
            await agent.identify()
        for command_id in started:
            then = (await agent.call("GET", f"/v1/commands/{command_id}"))["stdout_bytes"]
            await until(lambda command_id=command_id, then=then: _told(agent, command_id, more_than=then))


async def _crowded(machine: Any, sandbox_id: str) -> bool:
    return (await machine.runtime.stats(sandbox_id)).processes > 80


async def _grows(agent: Agent, before: int) -> bool:
    return int(await agent.run("stat -c %s /tmp/count")) > before


async def agent_codes(agent: Agent, target: str) -> str:
    with pytest.raises(CpuosError) as refused:
        await agent.call("GET", target)
    return refused.value.code


async def _told(agent: Agent, command_id: str, *, more_than: int = 0) -> bool:
    return (await agent.call("GET", f"/v1/commands/{command_id}"))["stdout_bytes"] > more_than
