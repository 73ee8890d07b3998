"""Ended commands are forgotten by the agent: in one go where that works, one by one where it does not."""

from __future__ import annotations

import asyncio

import pytest
from gateway_rig import SANDBOX, DataClient, LocalDialler, Rig

from cpuos.gateway.agent import client as agent_client
from cpuos.gateway.agent.client import AgentClient
from cpuos.testing.waiting import until


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "DELETE_QUIET_S", 0.0)


async def test_the_agent_keeps_no_ended_command(client: DataClient, rig: Rig) -> None:
    for _ in range(5):
        assert (await client.exec("exit 3")).end["exit_code"] == 3
    agent = await rig.gateway.sandboxes.get(SANDBOX).agent()

    async def all_forgotten() -> bool:
        return (await agent.commands()).commands == []

    await until(all_forgotten)


@pytest.mark.parametrize("closes", [b"", b"Connection: close\r\n"])
async def test_each_is_asked_to_its_answer(closes: bytes) -> None:
    answered: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                answered.append(head.split()[1].rpartition("/")[2])
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + closes + b"\r\n{}")
                if closes:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    dialler = LocalDialler(address=server.sockets[0].getsockname())
    agent = AgentClient(dialler, sandbox_id=SANDBOX, generation=1)
    wanted = [f"command{number}" for number in range(5)]
    async with server:
        for command_id in wanted:
            agent.forget_command(command_id)
        await until(lambda: set(answered) == set(wanted))
        await agent.aclose()
    assert set(answered) == set(wanted)
    if not closes:
        assert answered == wanted


async def test_what_ends_while_others_are_being_forgotten_is_forgotten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "DELETE_QUIET_S", 0.02)
    answered: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                answered.append(head.split()[1].rpartition("/")[2])
                if answered == ["command0"]:
                    agent.forget_command("command1")  # a second task begins, and the first goes on after this answer
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    monkeypatch.setattr(AgentClient, "_spawn", lambda self, work: begun.append(asyncio.create_task(work)))
    begun: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    agent = AgentClient(LocalDialler(address=server.sockets[0].getsockname()), sandbox_id=SANDBOX, generation=1)
    async with server:
        agent.forget_command("command0")
        await until(lambda: len(answered) == 2)
        problems = await asyncio.gather(*begun, return_exceptions=True)
        await agent.aclose()
    assert [problem for problem in problems if problem is not None] == []
    assert answered == ["command0", "command1"]
