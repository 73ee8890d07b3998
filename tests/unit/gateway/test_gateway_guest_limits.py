"""What a guest's own kernel says of its limits: asked only where nobody else knows, and told as its word."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cpuos.errors import AgentFailure
from cpuos.gateway.agent.answers import GuestLimits, read_answer
from cpuos.gateway.agent.client import AgentClient
from cpuos.gateway.reached import GuestLimitReader
from cpuos.types.limits import LimitFacts, LimitSource, SandboxLimit

FACTS = {"memory_bytes": 256 << 20, "disk_bytes": 64 << 20, "tmp_bytes": 64 << 20, "processes": 50}
FULL = b"""{"full": [{"limit": "disk", "path": "/", "value": 7},
  {"limit": "inodes", "path": "/workspace", "value": 8192},
  {"limit": "processes", "path": null, "value": 9}]}"""


class Node:
    def __init__(self, *, guest_knows: bool) -> None:
        self._facts = LimitFacts(**FACTS, guest_knows=guest_knows)

    async def limits(self, sandbox_id: str, generation: int) -> LimitFacts:
        return self._facts


class Agent:
    def __init__(self, answer: bytes | Exception | None) -> None:
        self.asked = 0
        self._answer = answer

    async def limits(self) -> Any:
        self.asked += 1
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return read_answer(GuestLimits, cast(bytes, self._answer))


async def ask(agent: Agent, *, guest_knows: bool) -> LimitFacts:
    return await GuestLimitReader(Node(guest_knows=guest_knows), cast(AgentClient, agent)).limits("a" * 20, 1)


async def test_where_the_node_measures_nobody_asks_the_guest() -> None:
    agent = Agent(FULL)
    assert await ask(agent, guest_knows=False) == LimitFacts(**FACTS)
    assert agent.asked == 0


async def test_its_word_is_told_as_its_word_with_our_values() -> None:
    """The limits themselves are the request's; of inodes only the guest has a number."""
    full = (await ask(Agent(FULL), guest_knows=True)).full
    assert [(place.limit, place.value, place.path) for place in full] == [
        (SandboxLimit.DISK, 64 << 20, "/"),
        (SandboxLimit.INODES, 8192, "/workspace"),
        (SandboxLimit.PROCESSES, 50, None),
    ]
    assert {place.seen_by for place in full} == {LimitSource.GUEST}


@pytest.mark.parametrize(
    "answer",
    [
        AgentFailure("cannot read the limits", "no such call"),
        b'{"full": [{"limit": "session", "path": null, "value": 1}]}',
        b'{"full": [{"limit": "disk", "path": "/etc/../x", "value": 1}]}',
        None,
    ],
    ids=["earlier", "limit", "path", "silent"],
)
async def test_without_a_valid_word_nothing_is_concluded(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception | None
) -> None:
    """Neither that a disk is full, nor that none is: words of a full one would be taken as of /tmp."""
    monkeypatch.setattr("cpuos.gateway.reached.GUEST_ASK_S", 0.01)
    facts = await ask(Agent(answer), guest_knows=True)
    assert (facts.full, facts.tmp_bytes) == ([], 0)
