"""The sans-I/O parsers of the agent client: split anywhere, never fooled."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.errors import AgentFailure, FileProblem
from cpuos.gateway.agent.answers import Ended, Hello, read_answer, refusal
from cpuos.gateway.agent.frames import agent_frames
from cpuos.gateway.agent.http import AnswerParser, ChunkedDecoder
from cpuos.types.frames import FrameKind, encode_frame

GOLDEN = Path(__file__).resolve().parents[3] / "api" / "frames.json"


def collect(stream: bytes, cuts: list[int]) -> list[tuple[FrameKind, int, bytes]]:
    """Pieces of output frames joined again."""
    pieces, joined = agent_frames(), []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        for kind, offset, payload in pieces.feed(memoryview(stream)[start:end]):
            last = joined[-1] if joined else None
            if last and kind in (1, 2) and last[0] is kind and last[1] + len(last[2]) == offset:
                joined[-1] = (kind, last[1], last[2] + bytes(payload))
            else:
                joined.append((kind, offset, bytes(payload)))
    assert pieces.whole
    return joined


STREAM = (
    encode_frame(FrameKind.STARTED, b'{"pid":1}')
    + encode_frame(FrameKind.STDOUT, b"hello", offset=0)
    + encode_frame(FrameKind.KEEPALIVE)
    + encode_frame(FrameKind.STDERR, b"x" * 100, offset=7)
    + encode_frame(FrameKind.STDOUT, b"", offset=5)
    + encode_frame(FrameKind.ENDED, b'{"status":"exited"}')
)


def test_frames_split_at_every_boundary() -> None:
    whole = collect(STREAM, [])
    for cut in range(len(STREAM) + 1):
        assert collect(STREAM, [cut]) == whole


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_frames_split_anywhere(cuts: list[int]) -> None:
    assert collect(STREAM, cuts) == collect(STREAM, [])


def test_golden_frames() -> None:
    """The ones of the agent's direction are read as they are meant, the host's are refused."""
    for golden in json.loads(GOLDEN.read_text())["frames"]:
        data, kind = bytes.fromhex(golden["frame"]), FrameKind[golden["kind"]]
        if kind in (FrameKind.GAP, FrameKind.STDIN, FrameKind.STDIN_END, FrameKind.RESIZE, FrameKind.KILL):
            with pytest.raises(AgentFailure):
                collect(data, [])
        elif golden["payload"] or kind is FrameKind.KEEPALIVE:
            assert collect(data, []) == [(kind, golden["offset"], bytes.fromhex(golden["payload"]))]


@pytest.mark.parametrize(
    "header",
    [
        bytes([99]) + bytes(15),  # an unknown kind
        bytes([16]) + bytes(15),  # STDIN is the other direction's
        bytes([1, 1]) + bytes(14),  # reserved bytes
        bytes([1, 0, 0, 1]) + bytes(12),
        bytes([1, 0, 0, 0, 0, 16, 0, 1]) + bytes(8),  # over 1 MiB
        bytes([4, 0, 0, 0, 0, 1, 0, 1]) + bytes(8),  # JSON over 64 KiB
        bytes([6, 0, 0, 0, 0, 0, 0, 1]) + bytes(8),  # a keep-alive with bytes
    ],
)
def test_frames_out_of_contract(header: bytes) -> None:
    with pytest.raises(AgentFailure):
        list(agent_frames().feed(memoryview(header)))


def parse(data: bytes) -> object:
    head, _ = AnswerParser().parse(bytearray(data), 0, len(data))
    return head


def test_a_head_split_at_every_boundary() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b \r\n\r\nhello"
    for cut in range(len(data)):
        parser, start = AnswerParser(), 0
        buffer = bytearray(data)
        head, start = parser.parse(buffer, start, cut)
        if head is None:
            head, start = parser.parse(buffer, start, len(data))
        assert (head.status, head.length, head.headers[b"x-a"]) == (200, 5, b"b")
        assert data[start:] == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 999 x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : x\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * (16 << 10),
    ],
)
def test_heads_out_of_contract(data: bytes) -> None:
    with pytest.raises(AgentFailure):
        parse(data)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_chunked_bodies_split_anywhere(chunks: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    decoder = ChunkedDecoder()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    got = []
    for start, end in itertools.pairwise(edges):
        got += decoder.feed(data[start:end])
    assert b"".join(got) == b"".join(chunks)
    assert decoder.done


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"5;ext=1\r\nhello\r\n0\r\n\r\n",
        b"-5\r\n",
        b"5\r\nhelloXX",
        b"fffffffff\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
        b"0\r\n\r\nmore",
        b"5\nhello",
    ],
)
def test_chunked_bodies_out_of_contract(data: bytes) -> None:
    with pytest.raises(AgentFailure):
        ChunkedDecoder().feed(data)


ENDED = {"status": "exited", "exit_code": 0, "signal": None, "limit": None, "reason": "", "duration_s": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "sandbox_lost"},
        {"status": "oom_killed"},
        {"exit_code": 256},
        {"exit_code": None},
        {"exit_code": "0"},
        {"exit_code": True},
        {"status": "signalled"},
        {"status": "signalled", "exit_code": None, "signal": 65},
        {"status": "limited", "exit_code": None},
        {"limit": "x"},
        {"signal": 9},
        {"reason": "x" * 1001},
        {"duration_s": -1},
        {"duration_s": float("nan")},
        {"stdout_bytes": -1},
        {"stdout_bytes": 1 << 64},
    ],
)
def test_ends_out_of_contract(changes: dict[str, object]) -> None:
    read_answer(Ended, json.dumps(ENDED).encode())
    with pytest.raises(AgentFailure):
        read_answer(Ended, json.dumps(ENDED | changes).encode())


@pytest.mark.parametrize("body", [b"", b"[", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"null"])
def test_json_out_of_contract(body: bytes) -> None:
    for cls in (Hello, Ended):
        with pytest.raises(AgentFailure):
            read_answer(cls, body)


def test_refusals_become_our_codes() -> None:
    error = refusal(b'{"code":"file_not_found","message":"no such file","errno":2}', what="cannot read /x")
    assert isinstance(error, FileProblem)
    assert (error.code, error.what, error.why) == ("file_not_found", "cannot read /x", "no such file")
    assert refusal(b'{"code":"sandbox_lost","message":""}', what="x").code == "agent_invalid"
    assert refusal(b'{"code":"key_invalid","message":""}', what="x").code == "agent_invalid"
