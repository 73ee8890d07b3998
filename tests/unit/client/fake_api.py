"""Server and gateway in one: real sockets in a thread, programs and faults by script."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from cpuos.errors import ERRORS
from cpuos.types.frames import FrameKind, encode_frame

NOW = "2026-11-01T10:00:00Z"
LATER = "2036-11-01T10:00:00Z"
SANDBOX_ID = "abcdefghij0123456789"
SNAPSHOT_ID = "snapshot012345678901"


@dataclass
class Program:
    """What a command prints, piece by piece, and how it ends. `hold`: it ends only when killed."""

    output: list[tuple[str, bytes]] = field(default_factory=list)
    exit_code: int | None = 0
    status: str = "exited"
    hold: bool = False
    dropped: tuple[int, int] | None = None
    """Of stdout: the record has lost its middle."""
    reason: str = ""


@dataclass
class Fault:
    """Once, at the next request that fits: an error, no answer at all, or a body that stops early."""

    method: str
    path: str
    error: str | None = None
    close: bool = False
    cut_after: int | None = None
    delay_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    method: str
    path: str
    query: dict[str, str]
    raw_query: str
    headers: dict[str, str]
    body: bytes


class FakeApi:
    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.program: Callable[[dict[str, Any]], Program] = lambda start: Program()
        self.files: dict[bytes, bytes] = {}
        self.trees: dict[bytes, bytes] = {}
        self.stat: dict[bytes, dict[str, Any]] = {}
        self.commands: dict[str, dict[str, Any]] = {}
        self.created: dict[str, str] = {}
        self.killed: list[str] = []
        self.network: dict[str, Any] = {"mode": "internet"}
        self.workspace_network: dict[str, Any] = {"mode": "internet"}
        self.connections: list[dict[str, Any]] = []
        self.ports: dict[int, bool] = {}
        self.preview: tuple[int, Any, dict[str, str]] = (200, {}, {})
        """What the server behind a preview answers to `/json/version`: status, JSON, headers."""
        self.ticket = "ticket-1"
        self.frame_bytes = 1 << 16
        self._programs: dict[str, Program] = {}
        self._keys: dict[str, str] = {}
        self._stdin: dict[str, bytearray] = {}
        self._stdin_ends: set[str] = set()
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    def calls(self, method: str, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == method and re.fullmatch(path, seen.path)]

    def stdin(self, command_id: str) -> bytes:
        return bytes(self._stdin[command_id])

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopping.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while True:
                seen = await _read_request(reader)
                self.seen.append(seen)
                answer = _Answer(writer)
                fault = self._fault(seen)
                if fault is not None:
                    await asyncio.sleep(fault.delay_s)
                    answer.cut_after = fault.cut_after
                    if fault.close:
                        return
                    if fault.error:
                        await answer.error(fault.error, fault.details)
                        continue
                await self._route(seen, answer)
        except (asyncio.IncompleteReadError, ConnectionError, _Cut):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _fault(self, seen: Seen) -> Fault | None:
        for fault in self.faults:
            if fault.method == seen.method and re.fullmatch(fault.path, seen.path):
                self.faults.remove(fault)
                return fault
        return None

    async def _route(self, seen: Seen, answer: _Answer) -> None:
        path = seen.path
        if path == "/v1/health":
            await answer.json({"status": "ok", "version": "0.1.0", "parts": {}, "news": 1})
        elif path == "/json/version":
            status, value, headers = self.preview
            await answer.whole(status, json.dumps(value).encode(), "application/json", headers)
        elif re.fullmatch(rf"/v1/sandboxes/{SANDBOX_ID}/ports(/\d+)?", path):
            await self._ports(seen, answer)
        elif re.fullmatch(rf"/v1/sandboxes/{SANDBOX_ID}/(pause|resume|snapshots|fork)|/v1/snapshots(/.*)?", path):
            await self._lifecycle(seen, answer)
        elif (
            path == "/v1/workspace/network"
            or path == "/v1/sandboxes"
            or re.fullmatch(r"/v1/sandboxes/[^/]+(/access|/links|/network|/connections)?", path)
        ):
            await self._control(seen, answer)
        elif seen.headers.get("authorization") != f"Bearer {self.ticket}":
            await answer.error("ticket_expired")
        elif match := re.fullmatch(rf"/v1/sandboxes/{SANDBOX_ID}/commands(?:/([^/]+))?(?:/([^/]+))?", path):
            await self._command(seen, answer, match[1], match[2])
        elif match := re.fullmatch(rf"/v1/sandboxes/{SANDBOX_ID}/files(?:/(\w+))?", path):
            await self._files(seen, answer, match[1])
        else:
            await answer.error("not_found")

    # control

    async def _control(self, seen: Seen, answer: _Answer) -> None:
        if seen.headers.get("authorization") != "Bearer cpk_test":
            await answer.error("key_invalid")
        elif seen.path.endswith("/access"):
            await answer.json(self.access())
        elif seen.path == "/v1/workspace/network":
            self.workspace_network = json.loads(seen.body) if seen.method == "PUT" else self.workspace_network
            await answer.json({"policy": self.workspace_network})
        elif seen.path.endswith("/network"):
            self.network = json.loads(seen.body) if seen.method == "PUT" else self.network
            both = {"policy": self.network, "workspace_policy": self.workspace_network}
            await answer.json({**both, "version": 2, "applied": True})
        elif seen.path.endswith("/connections"):
            after, limit = (int(seen.query[name]) for name in ("after", "limit"))
            verdict = seen.query.get("verdict")
            left = [one for one in self.connections if one["id"] > after and verdict in (None, one["verdict"])]
            page = left[:limit]
            following = page[-1]["id"] if len(left) > limit else None
            await answer.json({"connections": page, "next_after": following})
        elif seen.path.endswith("/links"):
            await answer.json({"url": f"{self.url}/v1/links/x", "expires_at": LATER})
        elif seen.method == "POST":
            key = seen.headers["idempotency-key"]
            self.created[key] = SANDBOX_ID
            await answer.json({"sandbox": self.sandbox(), "access": self.access()}, 201)
        elif seen.method == "DELETE":
            self.killed.append(seen.path.rpartition("/")[2])
            await answer.json(self.sandbox(state="stopped"))
        elif seen.path == "/v1/sandboxes":
            await answer.json({"sandboxes": [self.sandbox()]})
        elif seen.path.endswith("/nowhere"):
            await answer.error("sandbox_not_found")
        else:
            await answer.json(self.sandbox())

    async def _lifecycle(self, seen: Seen, answer: _Answer) -> None:
        last = seen.path.rpartition("/")[2]
        if last in ("pause", "resume"):
            self.state = "paused" if last == "pause" else "running"
            await answer.json(self.sandbox(state=self.state))
        elif last == "fork":
            self.created[seen.headers["idempotency-key"]] = SANDBOX_ID
            made = [{"sandbox": self.sandbox(), "access": self.access()}] * json.loads(seen.body)["count"]
            await answer.json({"sandboxes": made}, 201)
        elif seen.method == "POST":
            await answer.json(self.snapshot(**json.loads(seen.body)), 201)
        elif seen.path == "/v1/snapshots":
            await answer.json({"snapshots": [self.snapshot()]})
        elif last == "nowhere":
            await answer.error("snapshot_not_found")
        else:
            await answer.json(self.snapshot(state="deleting" if seen.method == "DELETE" else "ready"))

    async def _ports(self, seen: Seen, answer: _Answer) -> None:
        def url(port: int) -> str:
            return f"http://{port}-{SANDBOX_ID}.preview.localhost:{self.port}/"

        if seen.method == "POST":
            asked = json.loads(seen.body)
            port = asked["port"]
            public = self.ports[port] = asked["public"]
            told = {"port": port, "url": url(port), "public": public, "token": None if public else "secret"}
            await answer.json({**told, "expires_at": None if public else LATER})
            return
        if seen.method == "DELETE":
            self.ports.pop(int(seen.path.rpartition("/")[2]), None)
        by = {"created_at": NOW, "created_by": "key:x"}
        listed = [{"port": port, "url": url(port), "public": public, **by} for port, public in self.ports.items()]
        await answer.json({"ports": listed})

    def sandbox(self, **changes: Any) -> dict[str, Any]:
        values = {
            "id": SANDBOX_ID,
            "name": "box",
            "workspace": "default",
            "state": "running",
            "template": "python",
            "isolation": "gvisor",
            "cpu": 2,
            "memory_mib": 2048,
            "disk_mib": 8192,
            "max_processes": 512,
            "timeout_s": 900,
            "created_at": NOW,
            "a_field_of_tomorrow": True,
        }
        return values | changes

    def snapshot(self, **changes: Any) -> dict[str, Any]:
        values = {
            **{"id": SNAPSHOT_ID, "name": "snap", "workspace": "default", "state": "ready", "sandbox": SANDBOX_ID},
            **{"memory": True, "size_bytes": 1 << 20, "template": "python", "runtime": "gvisor", "node": "node-1"},
            **{"cpu": 2, "memory_mib": 2048, "disk_mib": 8192, "max_processes": 512},
            **{"created_at": NOW, "created_by": "key:x", "a_field_of_tomorrow": True},
        }
        return values | changes

    def access(self) -> dict[str, Any]:
        return {"data_url": self.url, "ticket": self.ticket, "expires_at": LATER}

    # commands

    async def _command(self, seen: Seen, answer: _Answer, command_id: str | None, verb: str | None) -> None:
        if command_id is None and seen.method == "GET":
            await answer.json({"commands": [self.record(known) for known in self.commands]})
            return
        if command_id is None:
            command_id = self._start(seen)
            if json.loads(seen.body).get("detach"):
                await answer.json(self.record(command_id), 201)
            else:
                await self._stream(answer, command_id, {"stdout": 0, "stderr": 0})
            return
        if command_id not in self.commands:
            await answer.error("command_not_found")
        elif verb is None:
            await answer.json(self.record(command_id))
        elif verb == "stream":
            await self._stream(answer, command_id, {name: int(seen.query[name]) for name in ("stdout", "stderr")})
        elif verb == "kill":
            self.commands[command_id]["status"] = "killed"
            self._ended[command_id].set()
            await answer.json(self.record(command_id))
        elif verb == "wait":
            if not self._ended[command_id].is_set() and float(seen.query["timeout_s"]) > 1:
                await self._ended[command_id].wait()
            await answer.json(self.record(command_id))
        elif verb == "stdin":
            held = self._stdin[command_id]
            held[int(seen.query["offset"]) :] = seen.body
            if seen.query.get("end"):
                self._stdin_ends.add(command_id)
            await answer.json({"offset": len(held), "open": True})
        elif verb == "output":
            await self._output(seen, answer, command_id)

    def _start(self, seen: Seen) -> str:
        key = seen.headers["idempotency-key"]
        if key in self._keys:
            return self._keys[key]
        start = json.loads(seen.body)
        program = self.program(start)
        command_id = f"command{len(self.commands):09d}"
        self._keys[key] = command_id
        self._programs[command_id] = program
        self._stdin[command_id] = bytearray()
        self._ended[command_id] = asyncio.Event()
        argv = start.get("argv") or ["/bin/bash", "-c", start["command"]]
        self.commands[command_id] = {"argv": argv, "status": "running" if program.hold else program.status}
        if not program.hold:
            self._ended[command_id].set()
        return command_id

    def record(self, command_id: str) -> dict[str, Any]:
        program = self._programs[command_id]
        status = self.commands[command_id]["status"]
        record = {
            "id": command_id,
            "sandbox": SANDBOX_ID,
            "argv": self.commands[command_id]["argv"],
            "status": status,
            "exit_code": program.exit_code if status == "exited" else None,
            "reason": program.reason,
            "started_at": NOW,
            "duration_s": 0.5,
            "stdout_bytes": len(self._bytes(command_id, "stdout")),
            "stderr_bytes": len(self._bytes(command_id, "stderr")),
        }
        if status == "running":
            record |= {"duration_s": None}
        return record

    def _bytes(self, command_id: str, stream: str) -> bytes:
        return b"".join(data for name, data in self._programs[command_id].output if name == stream)

    async def _stream(self, answer: _Answer, command_id: str, offsets: dict[str, int]) -> None:
        await answer.begin(200, "application/vnd.cpuos.frames")
        await answer.frame(FrameKind.STARTED, {"command": self.record(command_id)})
        positions = {"stdout": 0, "stderr": 0}
        gap = self._programs[command_id].dropped
        for name, data in self._programs[command_id].output:
            for start in range(0, len(data), self.frame_bytes):
                piece = data[start : start + self.frame_bytes]
                at = positions[name]
                positions[name] += len(piece)
                if at + len(piece) <= offsets[name]:
                    continue
                if gap and name == "stdout" and gap[0] <= at < gap[1]:
                    await answer.frame(FrameKind.GAP, {"stream": "stdout", "from": gap[0], "to": gap[1]})
                    continue
                kind = FrameKind.STDOUT if name == "stdout" else FrameKind.STDERR
                await answer.send(encode_frame(kind, piece, offset=at))
        await answer.send(encode_frame(FrameKind.KEEPALIVE))
        await self._ended[command_id].wait()
        await answer.frame(FrameKind.ENDED, {"command": self.record(command_id)})
        await answer.end()

    async def _output(self, seen: Seen, answer: _Answer, command_id: str) -> None:
        data = self._bytes(command_id, seen.query["stream"])
        offset = int(seen.query["offset"])
        part = data[offset:][: int(seen.query.get("limit", len(data)))]
        headers = {"X-Output-Next": str(offset + len(part)), "X-Output-Total": str(len(data))}
        gap = self._programs[command_id].dropped
        if gap and offset < gap[1]:
            headers["X-Output-Gap"] = f"{gap[0]}-{gap[1]}"
        await answer.whole(200, part, "application/octet-stream", headers)

    # files

    async def _files(self, seen: Seen, answer: _Answer, verb: str | None) -> None:
        path = next((unquote_to_bytes(v.replace("+", " ")) for k, _, v in _pairs(seen.raw_query) if k == "path"), b"")
        if verb == "stat" or (verb is None and seen.method == "PUT"):
            if seen.method == "PUT":
                self.files[path] = seen.body
            if path in self.stat or path in self.files:
                await answer.json(self._info(path))
            else:
                await answer.error("file_not_found")
        elif verb == "list":
            await answer.json({"entries": [self._info(known) for known in sorted(self.files)], "truncated": False})
        elif verb == "tree" and seen.method == "GET":
            await answer.begin(200, "application/x-tar")
            await answer.send(self.trees[path])
            await answer.end()
        elif verb == "tree":
            self.trees[path] = seen.body
            await answer.json({"files": 1, "bytes": 1})
        elif verb == "watch":
            await answer.begin(200, "application/vnd.cpuos.frames")
            await answer.frame(FrameKind.EVENT, {"kind": "created", "path": "/workspace/a"})
            await answer.frame(FrameKind.ENDED, {})
            await answer.end()
        elif verb in ("mkdir", "move"):
            await answer.whole(204, b"", None, {})
        elif path not in self.files:
            await answer.error("file_not_found")
        elif seen.method == "DELETE":
            del self.files[path]
            await answer.whole(204, b"", None, {})
        else:
            data = self.files[path]
            start = int(seen.query.get("offset", 0))
            part = data[start:][: int(seen.query.get("length", len(data)))]
            await answer.whole(200, part, "application/octet-stream", {"X-File-Size": str(len(data))})

    def _info(self, path: bytes) -> dict[str, Any]:
        values = {
            "path": path.decode("utf-8", "replace"),
            "kind": "file",
            "size": len(self.files.get(path, b"")),
            "mode": 0o644,
            "user": "user",
            "group": "user",
            "uid": 1000,
            "gid": 1000,
            "modified_at": NOW,
        }
        return values | self.stat.get(path, {})


class _Cut(Exception):
    """The script says that the connection ends here."""


class _Answer:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.cut_after: int | None = None

    async def begin(self, status: int, content_type: str) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        self._writer.write(head.encode())

    async def send(self, data: bytes) -> None:
        if self.cut_after is not None:
            kept, self.cut_after = data[: self.cut_after], self.cut_after - len(data)
            if self.cut_after < 0:
                if kept:
                    self._writer.write(b"%x\r\n%b\r\n" % (len(kept), kept))
                    await self._writer.drain()
                raise _Cut
        if data:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await self._writer.drain()

    async def end(self) -> None:
        if self.cut_after is not None:
            raise _Cut
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def frame(self, kind: FrameKind, value: dict[str, Any]) -> None:
        await self.send(encode_frame(kind, json.dumps(value).encode()))

    async def json(self, value: dict[str, Any], status: int = 200) -> None:
        await self.whole(status, json.dumps(value).encode(), "application/json", {})

    async def error(self, code: str, details: dict[str, Any] | None = None) -> None:
        body = {"error": {"code": code, "what": f"cannot: {code}", "why": "", "try": "", "details": details or {}}}
        await self.json(body, ERRORS[code][1])

    async def whole(self, status: int, body: bytes, content_type: str | None, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} X"]
        if content_type:
            lines += [f"content-type: {content_type}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        if self.cut_after is not None:
            body = body[: self.cut_after]
        self._writer.write(body)
        await self._writer.drain()
        if self.cut_after is not None:
            raise _Cut


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
    path, _, raw = target.partition("?")
    body = bytearray()
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body += await reader.readexactly(int(headers.get("content-length", 0)))
    query = dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"))
    return Seen(method=method, path=path, query=query, raw_query=raw, headers=headers, body=bytes(body))


def _pairs(raw: str) -> list[tuple[str, str, str]]:
    return [part.partition("=") for part in raw.split("&")]
