"""Commands of the fake agent: real local processes, with rings, offsets, whole-tree kill and time limits as in
api/guest.md."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import pwd
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

from cpuos.testing.fake_http import GuestError, HttpRequest, HttpResponse
from cpuos.testing.fake_process import RING_BYTES, Ring, find_tree, readable
from cpuos.types.frames import FrameDecoder, FrameError, FrameKind, encode_frame

__all__ = ["FakeCommand", "FakeCommands"]

COPY_BYTES = 64 << 10
QUIET_S = 0.1
KEEPALIVE_S = 5.0
STDIN_BYTES = 1 << 20
MAX_COMMANDS = 512


class FakeCommand:
    """One program. A connection may come and go; the command does not care."""

    def __init__(self, command_id: str, body: dict[str, Any], *, copies: Path) -> None:
        self.id = command_id
        self.body = body
        self.pid = 0
        self.ended: dict[str, Any] | None = None
        self.rings = {"stdout": Ring(), "stderr": Ring()}
        self.changed = asyncio.Condition()
        self.stdin_taken = 0
        self._stdin_waiting = bytearray()
        self._stdin_ends = False
        self._stdin_task: asyncio.Task[None] | None = None
        self._copies = copies / command_id
        self._copying: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._stdin: int | None = None
        self._terminal: int | None = None
        self._kill_reason: tuple[str, str] | None = None
        self._sent_signals: dict[int, str] = {}
        self._started = time.monotonic()
        self._last_output = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._streaming: asyncio.Task[Any] | None = None

    @property
    def argv(self) -> list[str]:
        return self.body.get("argv") or ["/bin/bash", "-c", self.body["command"]]

    def start(self, *, cwd: str, env: dict[str, str], credentials: dict[str, Any]) -> None:
        """Start the program and the tasks that read it."""
        outputs = self._open_streams()
        try:
            self._process = subprocess.Popen(
                self.argv,
                cwd=cwd,
                env=env | {"CPUOS_COMMAND": self.id},
                start_new_session=True,
                stdin=self._child_stdin,
                stdout=self._child_out["stdout"],
                stderr=self._child_out["stderr"],
                preexec_fn=self._take_terminal if self._terminal is not None else None,
                **credentials,
            )
        except OSError:
            for descriptor in [*outputs.values(), *([self._stdin] if self._stdin is not None else [])]:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            raise
        finally:
            for descriptor in self._child_descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.pid = self._process.pid
        self._tasks = [asyncio.create_task(self._read(name, fd)) for name, fd in outputs.items()]
        self._tasks.append(asyncio.create_task(self._watch()))

    def _open_streams(self) -> dict[str, int]:
        if self.body.get("pty"):
            master, slave = pty.openpty()
            self._terminal = self._stdin = master
            self.resize(self.body["pty"])
            self._child_stdin, self._child_out = slave, {"stdout": slave, "stderr": slave}
            self._child_descriptors = [slave]
            outputs = {"stdout": master}
        else:
            outputs, self._child_out, self._child_descriptors = {}, {}, []
            for name in ("stdout", "stderr"):
                outputs[name], child = os.pipe()
                self._child_out[name] = child
                self._child_descriptors.append(child)
            if self.body.get("stdin") == "open":
                child, self._stdin = os.pipe()
                self._child_descriptors.append(child)
                self._child_stdin = child
            else:
                self._child_stdin = subprocess.DEVNULL
        for descriptor in [*outputs.values(), *([self._stdin] if self._stdin is not None else [])]:
            os.set_blocking(descriptor, False)
        return outputs

    def _take_terminal(self) -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, size: dict[str, int]) -> None:
        if self._terminal is not None:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))

    # reading

    async def _read(self, name: str, descriptor: int) -> None:
        ring = self.rings[name]
        try:
            while True:
                while ring.full:
                    ring.acknowledged.clear()
                    await ring.acknowledged.wait()
                await readable(descriptor)
                try:
                    data = os.read(descriptor, min(RING_BYTES - len(ring.data), 256 << 10))
                except BlockingIOError:
                    continue
                except OSError:  # a pty's last writer is gone
                    return
                if not data:
                    return
                self._last_output = time.monotonic()
                if self.ended is None:
                    self._keep_copy(name, data)
                    ring.data += data
                    await self._notify()
        finally:
            self._close_when_unused(descriptor)

    def _close_when_unused(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        if descriptor == self._terminal:
            self._terminal = self._stdin = None

    def _keep_copy(self, name: str, data: bytes) -> None:
        """From the first byte on, once the output is large: the ring still holds all before."""
        copy = self._copying.get(name)
        if copy is None:
            copy = self._copying[name] = bytearray()
        if isinstance(copy, bytearray):
            copy += data
            if len(copy) > COPY_BYTES:
                self._copies.mkdir(parents=True, exist_ok=True)
                self._copying[name] = open(self._copies / name, "wb", buffering=0)  # noqa: SIM115
                self._copying[name].write(copy)
        else:
            copy.write(data)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # the end

    async def _watch(self) -> None:
        assert self._process is not None
        limit = self.body.get("timeout_s")
        timer = asyncio.get_running_loop().call_later(limit, self._time_out) if limit else None
        pidfd = os.pidfd_open(self.pid)
        try:
            await readable(pidfd)
        finally:
            os.close(pidfd)
            if timer is not None:
                timer.cancel()
        code = self._process.wait()
        if self._kill_reason is not None:
            await self.kill_tree()
        readers = self._tasks[:-1]
        while any(not task.done() for task in readers):
            await asyncio.wait(readers, timeout=QUIET_S / 4)
            full = any(ring.full for ring in self.rings.values())
            if not full and time.monotonic() - self._last_output > QUIET_S:
                break
        await self._end(code)

    async def _end(self, code: int) -> None:
        status = "exited" if code >= 0 else "signalled"
        reason = ""
        if self._kill_reason is not None:
            status, reason = self._kill_reason
        elif -code in self._sent_signals:
            status, reason = "killed", self._sent_signals[-code]
        copied = [copy for copy in self._copying.values() if not isinstance(copy, bytearray)]
        for copy in copied:
            copy.close()
        self.ended = {
            "status": status,
            "exit_code": code if status == "exited" else None,
            "signal": -code if code < 0 else None,
            "limit": None,
            "reason": reason,
            "duration_s": time.monotonic() - self._started,
            "stdout_bytes": self.rings["stdout"].end,
            "stderr_bytes": self.rings["stderr"].end,
            "output_path": f"/var/log/cpuos/commands/{self.id}" if copied else None,
        }
        if self._stdin is not None and self._stdin != self._terminal:
            os.close(self._stdin)
            self._stdin = None
        await self._notify()

    def _time_out(self) -> None:
        self._kill_reason = ("timed_out", f"its time limit of {self.body['timeout_s']:g} s passed")
        self._signal_tree(signal.SIGKILL)

    async def kill(self, number: int, *, reason: str) -> None:
        if self.ended is not None:
            return
        if number == signal.SIGINT and self._terminal is not None:
            os.write(self._terminal, b"\x03")
            return
        if number == signal.SIGKILL:
            self._kill_reason = self._kill_reason or ("killed", reason)
            await self.kill_tree()
        else:
            self._sent_signals[number] = reason
            self._signal_tree(number)

    async def kill_tree(self) -> None:
        for _ in range(1000):
            if not self._signal_tree(signal.SIGKILL):
                return
            await asyncio.sleep(0.01)
        raise GuestError("internal", "processes are left after ten seconds")

    def _signal_tree(self, number: int) -> int:
        """Signal every process of this command; how many were not yet dead."""
        alive = find_tree(self.pid, self.id)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return len(alive)

    # stdin

    def take_stdin(self, data: bytes, offset: int) -> None:
        """Bytes already taken are skipped. They wait here until the program reads: nothing behind them is blocked."""
        end = self.stdin_taken + len(self._stdin_waiting)
        if offset > end:
            raise GuestError("invalid", f"stdin was taken until {end}")
        self._stdin_waiting += data[max(0, end - offset) :]
        self._wake_stdin()

    async def post_stdin(self, data: bytes, offset: int, *, end: bool) -> int:
        """The ordinary call: returns when all but the last 1 MiB is with the program."""
        self.take_stdin(data, offset)
        if end:
            self.end_stdin()
        async with self.changed:
            await self.changed.wait_for(lambda: len(self._stdin_waiting) <= STDIN_BYTES or self.ended is not None)
        return self.stdin_taken + len(self._stdin_waiting)

    def end_stdin(self) -> None:
        self._stdin_ends = True
        self._wake_stdin()

    def _wake_stdin(self) -> None:
        if self._stdin_task is None or self._stdin_task.done():
            self._stdin_task = asyncio.create_task(self._write_stdin())

    async def _write_stdin(self) -> None:
        while self._stdin_waiting:
            written = len(self._stdin_waiting)  # thrown away once the program has closed its stdin
            if self._stdin is not None and self.ended is None:
                try:
                    written = os.write(self._stdin, self._stdin_waiting)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                    continue
                except OSError:
                    pass
            del self._stdin_waiting[:written]
            self.stdin_taken += written
            await self._notify()
        if self._stdin_ends and self._stdin is not None:
            if self._stdin == self._terminal:
                os.write(self._terminal, b"\x04")
            else:
                os.close(self._stdin)
                self._stdin = None
            self._stdin_ends = False

    def facts(self) -> dict[str, Any]:
        counts = {f"{name}_bytes": ring.end for name, ring in self.rings.items()}
        unknown = dict.fromkeys(("exit_code", "signal", "limit", "output_path"))
        running = {
            "status": "running",
            "reason": "",
            "duration_s": time.monotonic() - self._started,
            **unknown,
            **counts,
        }
        return {"id": self.id, "pid": self.pid, "stdin_bytes": self.stdin_taken, **(self.ended or running)}

    # streams

    async def stream(self, request: HttpRequest, *, offsets: dict[str, int]) -> None:
        """Send frames from these offsets until the end; take frames of the host meanwhile. The newest stream counts."""
        for name, offset in offsets.items():
            if offset > self.rings[name].end:
                raise GuestError("invalid", f"{name} was written until {self.rings[name].end}")
        if self._streaming is not None:
            self._streaming.cancel()
        for name, offset in offsets.items():
            self.rings[name].drop_until(offset)
        await request.upgrade()
        self._streaming = asyncio.current_task()
        gaps = {name: (offset, self.rings[name].start) for name, offset in offsets.items()}
        started = {"pid": self.pid, "stdin": self.stdin_taken}
        request.writer.write(encode_frame(FrameKind.STARTED, json.dumps(started).encode()))
        for name, (first, kept) in gaps.items():
            if first < kept:
                gap = {"stream": name, "from": first, "to": kept}
                request.writer.write(encode_frame(FrameKind.GAP, json.dumps(gap).encode()))
        taking = asyncio.create_task(self._take_frames(request))
        sending = asyncio.create_task(self._send_frames(request, offsets))
        try:
            await asyncio.wait([taking, sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (taking, sending):
                task.cancel()
            await asyncio.gather(taking, sending, return_exceptions=True)
            if self._streaming is asyncio.current_task():
                self._streaming = None

    async def _send_frames(self, request: HttpRequest, offsets: dict[str, int]) -> None:
        kinds = {"stdout": FrameKind.STDOUT, "stderr": FrameKind.STDERR}
        stdin_told = self.stdin_taken
        while True:
            sent = False
            if stdin_told != self.stdin_taken:
                stdin_told = self.stdin_taken
                request.writer.write(encode_frame(FrameKind.ACK, json.dumps({"stdin": stdin_told}).encode()))
            for name, ring in self.rings.items():
                offsets[name] = max(offsets[name], ring.start)
                data = bytes(ring.data[offsets[name] - ring.start :][: 256 << 10])
                if data:
                    request.writer.write(encode_frame(kinds[name], data, offset=offsets[name]))
                    offsets[name] += len(data)
                    sent = True
            await request.writer.drain()
            if sent:
                continue
            if self.ended is not None:
                request.writer.write(encode_frame(FrameKind.ENDED, json.dumps(self.ended).encode()))
                await request.writer.drain()
                return
            try:
                async with asyncio.timeout(KEEPALIVE_S), self.changed:
                    told = stdin_told == self.stdin_taken
                    if told and self.ended is None and all(offsets[n] == ring.end for n, ring in self.rings.items()):
                        await self.changed.wait()
            except TimeoutError:
                request.writer.write(encode_frame(FrameKind.KEEPALIVE))

    async def _take_frames(self, request: HttpRequest) -> None:
        decoder = FrameDecoder()
        while data := await request.reader.read(256 << 10):
            try:
                for frame in decoder.feed(data):
                    await self._take(frame.kind, frame.payload, frame.offset)
            except (FrameError, GuestError):  # out of contract: the stream ends
                return

    async def _take(self, kind: FrameKind, payload: bytes, offset: int) -> None:
        if kind is FrameKind.STDIN:
            self.take_stdin(payload, offset)
        elif kind is FrameKind.STDIN_END:
            self.end_stdin()
        elif kind is FrameKind.ACK:
            for name, held in json.loads(payload).items():
                if name in self.rings:
                    self.rings[name].drop_until(held)
        elif kind is FrameKind.RESIZE:
            self.resize(json.loads(payload))
        elif kind is FrameKind.KILL:
            asked = json.loads(payload)
            await self.kill(int(asked.get("signal", 9)), reason=str(asked.get("reason", "")))

    async def close(self) -> None:
        if self.ended is None and self.pid:
            self._kill_reason = self._kill_reason or ("killed", "the agent ends")
            with contextlib.suppress(GuestError):
                await self.kill_tree()
        tasks = [*self._tasks, *([self._stdin_task] if self._stdin_task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            self._process.wait()


class FakeCommands:
    """The table of commands of one fake agent."""

    def __init__(self, root: Path, *, switch_users: bool) -> None:
        self._root = root
        self._switch_users = switch_users
        self._commands: dict[str, FakeCommand] = {}

    @property
    def running(self) -> int:
        return sum(command.ended is None for command in self._commands.values())

    def pids(self) -> set[int]:
        """Processes that have an owner here to wait for them."""
        return {command.pid for command in self._commands.values() if command.ended is None}

    def get(self, command_id: str) -> FakeCommand:
        try:
            return self._commands[command_id]
        except KeyError:
            raise GuestError("command_not_found", f"no command {command_id}") from None

    def list(self) -> list[dict[str, Any]]:
        return [command.facts() for command in self._commands.values()]

    async def start(self, request: HttpRequest) -> HttpResponse | None:
        command_id = request.text("id")
        body = await request.json()
        command = self._commands.get(command_id)
        if command is None:
            if len(self._commands) >= MAX_COMMANDS:
                raise GuestError("limit_reached", f"{MAX_COMMANDS} commands are held; delete ended ones")
            command = FakeCommand(command_id, body, copies=self._root / "var/log/cpuos/commands")
            self._start(command)
            self._commands[command_id] = command
        if not body.get("attach", True):
            return HttpResponse(status=201, json=command.facts())
        await command.stream(request, offsets={"stdout": 0, "stderr": 0})
        return None

    def _start(self, command: FakeCommand) -> None:
        body = command.body
        cwd = str(self._root / str(body.get("cwd") or "/workspace").lstrip("/"))
        home, credentials = self._user(str(body.get("user") or "user"))
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self._root / home.lstrip("/")),
            "USER": str(body.get("user") or "user"),
            "LOGNAME": str(body.get("user") or "user"),
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            **({"TERM": "xterm-256color"} if body.get("pty") else {}),
            **(body.get("env") or {}),
        }
        if not os.path.isdir(cwd):
            raise GuestError("cwd_not_found", f"no folder {body.get('cwd')}")
        try:
            command.start(cwd=cwd, env=env, credentials=credentials)
        except FileNotFoundError as error:
            raise GuestError("program_not_found", command.argv[0], errno=error.errno) from error
        except PermissionError as error:
            raise GuestError("program_not_executable", command.argv[0], errno=error.errno) from error

    def _user(self, name: str) -> tuple[str, dict[str, Any]]:
        if not self._switch_users:
            if name not in ("user", "root"):
                raise GuestError("user_not_found", f"no user {name}")
            return ("/home/user" if name == "user" else "/root"), {}
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise GuestError("user_not_found", f"no user {name}") from None
        return entry.pw_dir, {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def remove(self, command_id: str) -> None:
        if self.get(command_id).ended is None:
            raise GuestError("invalid", f"command {command_id} runs", status=409)
        del self._commands[command_id]

    async def close(self) -> None:
        for command in self._commands.values():
            await command.close()
