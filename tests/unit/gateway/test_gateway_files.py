"""Files through the gateway, against the real agent on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from gateway_rig import DataClient, Rig, error_code

from cpuos.testing.waiting import until
from cpuos.types.frames import FrameDecoder, FrameKind

ODD_NAMES = [
    "🤣.txt".encode(),
    "报告 1.pdf".encode(),
    b"a\"b'.txt",
    b"-rf",
    b"new\nline",
    "\u00e9".encode(),
    "e\u0301".encode(),
    b"x" * 255,
    b"%2e%2e",
    b"a;b?c#d&e=f+g",
    b" lead and trail ",
    b"back\\slash",
    b"\xff\xfe not utf-8 \x80",
    b"...",
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def at(path: Path | bytes) -> str:
    return f"path={quote(os.fsencode(path))}"


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_odd_names_go_through_every_call(client: DataClient, work: Path, name: bytes) -> None:
    path = os.fsencode(work) + b"/" + name
    written = await client.call("PUT", f"/files?{at(path)}", content=b"data")
    assert written.status_code == 200, written.text
    info = (await client.call("GET", f"/files/stat?{at(path)}")).json()
    assert (info["kind"], info["size"]) == ("file", 4)
    assert (info["raw"] is None) == (info["path"].encode() == path)
    assert (await client.call("GET", f"/files?{at(path)}")).content == b"data"
    listed = (await client.call("GET", f"/files/list?{at(work)}")).json()
    assert [entry["size"] for entry in listed["entries"]] == [4]
    target = os.fsencode(work) + b"/moved"
    moved = await client.call("POST", f"/files/move?{at(path)}&to={quote(target)}")
    assert moved.status_code in (200, 204), moved.text
    assert (work / "moved").read_bytes() == b"data"
    assert (await client.call("DELETE", f"/files?{at(target)}")).status_code == 204
    assert os.listdir(work) == []


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 16383, 65535, 65536, 1 << 20, (20 << 20) + 3])
async def test_bytes_are_equal(client: DataClient, work: Path, size: int) -> None:
    data = os.urandom(size)
    info = await client.call("PUT", f"/files?{at(work / 'blob')}&mode=0640", content=data)
    assert info.json()["size"] == size
    assert (work / "blob").read_bytes() == data
    answer = await client.call("GET", f"/files?{at(work / 'blob')}")
    assert hashlib.sha256(answer.content).digest() == hashlib.sha256(data).digest()
    assert answer.headers["x-file-size"] == str(size)
    part = await client.call("GET", f"/files?{at(work / 'blob')}&offset={size // 2}&length=100")
    assert part.content == data[size // 2 :][:100]


async def test_a_chunked_upload_of_unknown_length(client: DataClient, work: Path) -> None:
    data = os.urandom(3 << 20)

    async def pieces():
        for start in range(0, len(data), 70_001):
            yield data[start : start + 70_001]

    answer = await client.call("PUT", f"/files?{at(work / 'blob')}", content=pieces())
    assert answer.status_code == 200, answer.text
    assert (work / "blob").read_bytes() == data


async def test_an_upload_that_the_client_cuts_leaves_nothing(client: DataClient, rig: Rig, work: Path) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"PUT {client.base}/files?{at(work / 'cut')} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    writer.write(f"{head}Authorization: {client.http.headers['Authorization']}\r\n\r\n".encode() + b"x" * 500_000)
    await writer.drain()
    await until(rig.journal)
    writer.close()

    async def find_outcomes() -> list[dict[str, Any]]:
        return [entry for entry in await rig.journal() if entry["phase"] == "outcome"]

    outcomes = await until(find_outcomes)
    await until(lambda: os.listdir(work) == [])
    assert outcomes[-1]["detail"]["code"] == "upload_incomplete"
    assert outcomes[-1]["result"] == "error"


async def test_file_errors_have_their_codes(client: DataClient, work: Path) -> None:
    (work / "folder").mkdir()
    (work / "folder" / "file").write_text("x")
    os.mkfifo(work / "pipe")
    cases = [
        ("GET", f"/files?{at(work / 'missing')}", 404, "file_not_found"),
        ("GET", f"/files/stat?{at(work / 'missing')}", 404, "file_not_found"),
        ("GET", f"/files?{at(work / 'folder')}", 409, "is_a_directory"),
        ("GET", f"/files?{at(work / 'pipe')}", 409, "file_kind_unsupported"),
        ("GET", f"/files/list?{at(work / 'folder/file')}", 409, "not_a_directory"),
        ("DELETE", f"/files?{at(work / 'folder')}", 409, "directory_not_empty"),
        ("POST", f"/files/mkdir?{at(work / 'folder/file')}", 409, "file_exists"),
        ("PUT", f"/files?{at(work / 'folder/file')}&exclusive=true", 409, "file_exists"),
        ("PUT", f"/files?{at(work / 'folder')}", 409, "is_a_directory"),
        ("PUT", f"/files?{at(b'/' + b'y' * 300)}", 422, "file_name_invalid"),
        ("GET", f"/files?{at(work / 'a')}&user=nobody-here", 422, "user_not_found"),
        ("GET", "/files", 422, "invalid_request"),
        ("GET", f"/files?{at(work)}&unknown=1", 422, "invalid_request"),
        ("GET", f"/files?{at(work)}&{at(work)}", 422, "invalid_request"),
        ("POST", f"/files/move?{at(work)}", 422, "invalid_request"),
        ("GET", f"/files?path={'z' * 13000}", 422, "file_name_invalid"),
    ]
    for method, path, status, code in cases:
        answer = await client.call(method, path)
        assert (answer.status_code, error_code(answer)) == (status, code), (path, answer.text)


async def test_an_early_refusal_reaches_a_client_in_mid_upload(client: DataClient, work: Path) -> None:
    (work / "folder").mkdir()
    answer = await client.call("PUT", f"/files?{at(work / 'folder')}", content=b"x" * (24 << 20))
    assert (answer.status_code, error_code(answer)) == (409, "is_a_directory")


async def test_trees_as_tar(client: DataClient, work: Path) -> None:
    (work / "src" / "deep").mkdir(parents=True)
    (work / "src" / "deep" / "file").write_bytes(b"content")
    (work / "src" / "link").symlink_to("/etc/passwd")
    tar = await client.call("GET", f"/files/tree?{at(work / 'src')}")
    assert (tar.status_code, tar.headers["content-type"]) == (200, "application/x-tar")
    done = await client.call("PUT", f"/files/tree?{at(work / 'copy')}", content=tar.content)
    assert done.status_code == 200, done.text
    assert done.json()["bytes"] == 7
    assert (work / "copy" / "deep" / "file").read_bytes() == b"content"
    assert os.readlink(work / "copy" / "link") == "/etc/passwd"


async def test_watch_tells_events(client: DataClient, work: Path) -> None:
    decoder, kinds = FrameDecoder(), []
    async with asyncio.timeout(30), client.http.stream("GET", client.base + f"/files/watch?{at(work)}") as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_raw():
            for frame in decoder.feed(piece):
                if frame.kind is FrameKind.KEEPALIVE:
                    (work / "new").write_text("x")
                if frame.kind is FrameKind.EVENT:
                    kinds.append(json.loads(frame.payload)["kind"])
            if "created" in kinds:
                break
    answer = await client.call("GET", f"/files/watch?{at(work / 'missing')}")
    assert error_code(answer) == "file_not_found"


async def test_mutations_and_reads_are_journaled(client: DataClient, rig: Rig, work: Path) -> None:
    await client.call("PUT", f"/files?{at(work / 'a')}", content=b"abc")
    await client.call("GET", f"/files?{at(work / 'a')}")
    await client.call("POST", f"/files/move?{at(work / 'a')}&to={quote(str(work / 'b'))}")
    await client.call("DELETE", f"/files?{at(work / 'b')}")
    await client.call("DELETE", f"/files?{at(work / 'b')}")
    entries = [(entry["action"], entry["phase"], entry["result"]) for entry in await rig.journal()]
    assert entries == [
        ("file.write", "intent", None),
        ("file.write", "outcome", "ok"),
        ("file.read", "intent", None),
        ("file.read", "outcome", "ok"),
        ("file.move", "intent", None),
        ("file.move", "outcome", "ok"),
        ("file.remove", "intent", None),
        ("file.remove", "outcome", "ok"),
        ("file.remove", "intent", None),
        ("file.remove", "outcome", "error"),
    ]
    first = (await rig.journal())[0]
    assert (first["actor"], first["workspace"], first["target"]) == ("key:test", "default", str(work / "a"))


async def test_links_download_and_nothing_else(client: DataClient, rig: Rig, work: Path) -> None:
    path = work / 'bild\n"é.png'
    path.write_bytes(b"0123456789")
    token = rig.mint.ticket(scope=["link"], path=str(path))
    answer = await client.http.get(f"/v1/links/{token}", headers={"Authorization": ""})
    assert (answer.status_code, answer.content) == (200, b"0123456789")
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].startswith("attachment; ")
    assert quote('bild\n"é.png', safe="") in answer.headers["content-disposition"]
    part = await client.http.get(f"/v1/links/{token}", headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    expired = await client.http.get(f"/v1/links/{rig.mint.ticket(scope=['link'], path='/x', exp=1)}")
    assert (expired.status_code, error_code(expired)) == (401, "link_expired")
    wrong = await client.http.get(f"/v1/links/{rig.mint.ticket()}")
    assert (wrong.status_code, error_code(wrong)) == (403, "forbidden")
    no_exec = await client.call("GET", "/commands", headers={"Authorization": f"Bearer {token}"})
    assert (no_exec.status_code, error_code(no_exec)) == (403, "forbidden")
