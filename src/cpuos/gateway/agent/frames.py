"""Frames from an agent: only its own kinds, and JSON of bounded size; what is not plainly right is `AgentFailure`."""

from __future__ import annotations

from cpuos.gateway.agent.http import agent_invalid
from cpuos.types.frames import FrameKind, FramePieces

__all__ = ["MAX_JSON_FRAME", "agent_frames"]

MAX_JSON_FRAME = 64 << 10
_FROM_AGENT = frozenset(
    {
        FrameKind.STDOUT,
        FrameKind.STDERR,
        FrameKind.STARTED,
        FrameKind.ENDED,
        FrameKind.KEEPALIVE,
        FrameKind.EVENT,
        FrameKind.ERROR,
        FrameKind.ACK,
    }
)


def agent_frames() -> FramePieces:
    return FramePieces(kinds=_FROM_AGENT, max_json=MAX_JSON_FRAME, refuse=agent_invalid)
