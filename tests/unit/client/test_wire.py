"""HTTP/1.1 answers, however their bytes are cut, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.client._wire import AnswerParser, WireError, encode_head

FIXED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b: c\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nx-t: 1\r\n\r\n"
)
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + FIXED


def parse(data: bytes, cuts: list[int]) -> tuple[AnswerParser, bytes]:
    parser = AnswerParser()
    body = b""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        body += b"".join(parser.feed(data[start:end]))
    return parser, body


@given(st.sampled_from([FIXED, CHUNKED, CONTINUED]), st.lists(st.integers(0, 200), max_size=8))
def test_the_cuts_do_not_matter(data: bytes, cuts: list[int]) -> None:
    parser, body = parse(data, cuts)
    assert (body, parser.done, parser.keep_alive) == (b"hello world", True, True)
    assert parser.status in (200, 201)


@pytest.mark.parametrize("data", [FIXED, CHUNKED, EMPTY])
def test_an_answer_that_stops_early_is_an_error(data: bytes) -> None:
    for size in range(len(data)):
        parser, _ = parse(data[:size], [])
        with pytest.raises(WireError):
            parser.feed_end()
    parse(data, [])[0].feed_end()


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser, body = parse(b"HTTP/1.1 200 OK\r\n\r\nabc", [])
    assert (body, parser.done) == (b"abc", False)
    parser.feed_end()
    assert (parser.done, parser.keep_alive) == (True, False)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
    ],
    ids=lambda data: repr(data[-20:]),
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        parse(data, [])


@pytest.mark.parametrize("data", [FIXED, CHUNKED, EMPTY])
def test_more_than_was_asked_for_ends_the_connection(data: bytes) -> None:
    parser, body = parse(data + b"HTTP/1.1 200 OK\r\n", [])
    assert parser.done
    assert not parser.keep_alive
    assert body in (b"hello world", b"")


@given(st.binary(max_size=300))
def test_no_bytes_break_it(data: bytes) -> None:
    parser = AnswerParser()
    try:
        parser.feed(b"HTTP/1.1 200 OK\r\n" + data)
        parser.feed_end()
    except WireError:
        pass


def test_heads() -> None:
    head = encode_head("PUT", "/v1/x?a=b", host="h:1", headers={"a": "b"}, body=5)
    assert head == b"PUT /v1/x?a=b HTTP/1.1\r\nhost: h:1\r\na: b\r\ncontent-length: 5\r\n\r\n"
    assert b"content-length: 0" in encode_head("POST", "/", host="h", headers={}, body=0)
    assert b"content-length" not in encode_head("GET", "/", host="h", headers={}, body=0)
    assert b"transfer-encoding: chunked" in encode_head("PUT", "/", host="h", headers={}, body=None)
    for headers in ({"a": "b\r\nc: d"}, {"a\n": "b"}, {"a": "ü"}):
        with pytest.raises(WireError):
            encode_head("GET", "/", host="h", headers=headers, body=0)
