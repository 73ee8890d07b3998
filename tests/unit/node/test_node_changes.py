"""The feed of changes: waiting, closing, and readers from before."""

from __future__ import annotations

import asyncio

from cpuos.node.changes import GOOD_NEWS_S, ChangeFeed
from cpuos.types.node import SandboxFacts
from cpuos.types.sandbox import Isolation


async def test_closing_lets_waiters_go() -> None:
    feed = ChangeFeed(now=lambda: 1.0)
    seq, _ = await feed.after(0, wait_s=0)
    waiting = asyncio.create_task(feed.after(seq, wait_s=3600))
    await asyncio.sleep(0)
    feed.close()
    assert await asyncio.wait_for(waiting, 20) == (seq, [])
    assert await asyncio.wait_for(feed.after(seq, wait_s=3600), 20) == (seq, [])


async def test_a_reader_from_an_earlier_daemon_gets_everything_at_once() -> None:
    feed = ChangeFeed(now=lambda: 2.0)
    assert await feed.after(1_000_000, wait_s=3600) == (2_000_000, [])


def facts(sandbox_id: str, *, alive: bool = True) -> SandboxFacts:
    return SandboxFacts(
        id=sandbox_id,
        generation=1,
        alive=alive,
        runtime="fake",
        isolation=Isolation.NONE,
        isolation_detail="",
        template="base",
        template_digest="",
    )


async def test_a_burst_of_creates_is_one_word() -> None:
    feed = ChangeFeed()
    seq, _ = await feed.after(0, wait_s=0)
    waiting = asyncio.create_task(feed.after(seq, wait_s=60))
    await asyncio.sleep(0)
    for number in range(20):
        feed.publish(facts(f"{number:020}"))
        await asyncio.sleep(0)
    assert not waiting.done()
    _, changes = await waiting
    assert len(changes) == 20


async def test_a_death_is_told_at_once_and_all_before_it_too() -> None:
    feed = ChangeFeed()
    seq, _ = await feed.after(0, wait_s=0)
    waiting = asyncio.create_task(feed.after(seq, wait_s=60))
    await asyncio.sleep(0)
    feed.publish(facts("a" * 20))
    feed.publish(facts("b" * 20, alive=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done()
    assert [one.id for one in waiting.result()[1]] == ["a" * 20, "b" * 20]


async def test_who_asks_after_it_is_told_at_once() -> None:
    feed = ChangeFeed()
    seq, _ = await feed.after(0, wait_s=0)
    feed.publish(facts("a" * 20))
    assert len((await feed.after(seq, wait_s=60))[1]) == 1


async def test_who_knows_already_what_is_told_late_waits_on() -> None:
    feed = ChangeFeed()
    feed.publish(facts("a" * 20))
    seq, _ = await feed.after(0, wait_s=0)  # before it is told
    waiting = asyncio.create_task(feed.after(seq, wait_s=60))
    await asyncio.sleep(2 * GOOD_NEWS_S)
    assert not waiting.done()
    feed.publish(facts("a" * 20, alive=False))
    _, changes = await waiting
    assert [one.alive for one in changes] == [False]
