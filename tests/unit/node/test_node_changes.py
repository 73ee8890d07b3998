"""The feed of changes: waiting, closing, and readers from before."""

from __future__ import annotations

import asyncio

from cpuos.node.changes import ChangeFeed


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
