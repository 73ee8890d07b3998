"""What passes between a visitor and a server inside."""

from __future__ import annotations

import asyncio

import pytest
from gateway_rig import SANDBOX
from preview_rig import OK, Inside, PreviewRig, answering, serving


async def test_a_request_and_its_answer_pass(previews: PreviewRig) -> None:
    async with serving() as inside:
        await previews.publish(inside.port)
        answer = await previews.get(inside.port, "/a%20b?x=1&y", headers=previews.auth(inside.port))
        assert (answer.status, answer.body) == (200, b"ok")
        assert inside.heads[0].startswith(b"GET /a%20b?x=1&y HTTP/1.1\r\n")
        assert inside.header("host") == previews.host(inside.port)
        assert inside.header("x-forwarded-host") == previews.host(inside.port)
        assert inside.header("x-forwarded-proto") == "http"
        assert inside.header("x-forwarded-for") == "127.0.0.1"
