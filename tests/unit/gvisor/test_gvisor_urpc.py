"""The control-socket client against sockets that answer well, badly, too much, or never."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from cpuos.runtimes.gvisor.urpc import ControlSocket, UrpcFailure
from cpuos.runtimes.gvisor.victim import choose_victim
from cpuos.runtimes.gvisor.watchdog import VictimWorker

ID = "a" * 20


class Sentry:
    """Answers every connection with the same bytes and keeps what was asked."""

    def __init__(self, path, answer: bytes, *, repeat: int = 1) -> None:
        self.path, self.answer, self.repeat = path, answer, repeat
        self.asked: list[dict] = []

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader, writer):
        self.asked.append(json.loads(await reader.read()))
        try:
            for _ in range(self.repeat):
                writer.write(self.answer)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass


def answer(result) -> bytes:
    return json.dumps({"success": True, "err": "", "result": result}).encode()


async def test_process_limit_is_written_and_read(tmp_path):
    path = tmp_path / ("deep" * 40) / "runsc.sock"  # longer than a socket address
    path.parent.mkdir()
    short = tmp_path / "s"
    async with Sentry(short, answer({"results": [{"value": "17\n", "is_error": False}]})) as sentry:
        short.rename(path)
        control = ControlSocket(path, sandbox_id=ID)
        await control.set_process_limit(100)
        assert await control.count_processes() == 17
    assert sentry.asked[0] == {
        "method": "Cgroups.WriteControlFiles",
        "arg": {"args": [{"file": {"controller": "pids", "path": f"/{ID}", "name": "pids.max"}, "value": "100"}]},
    }


async def test_kill_names_sandbox_and_process(tmp_path):
    async with Sentry(tmp_path / "s", answer({})) as sentry:
        await ControlSocket(tmp_path / "s", sandbox_id=ID).kill(42)
    assert sentry.asked[0]["arg"] == {"CID": ID, "Signo": 9, "PID": 42, "Mode": 0}


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"success": false, "err": "no"}',
        b'{"success": 1, "result": {}}',
        b'{"success": true, "result": {"results": []}}',
        b'{"success": true, "result": {"results": [{"value": "gone", "is_error": true}]}}',
        b"[" * 60000,
        b"\xff\xfe",
    ],
)
async def test_bad_answers_are_failures(tmp_path, reply):
    async with Sentry(tmp_path / "s", reply):
        with pytest.raises(UrpcFailure, match="cannot call Cgroups"):
            await ControlSocket(tmp_path / "s", sandbox_id=ID).count_processes()


async def test_endless_answer_is_cut(tmp_path):
    async with Sentry(tmp_path / "s", b"x" * 65536, repeat=1000):
        with pytest.raises(UrpcFailure, match="over 65536 bytes"):
            await ControlSocket(tmp_path / "s", sandbox_id=ID).kill(2)


async def test_nobody_there_is_a_failure(tmp_path):
    with pytest.raises(UrpcFailure, match="cannot reach"):
        await ControlSocket(tmp_path / "s", sandbox_id=ID).kill(2)


def process(pid, size, **more):
    return {"status": {"pid": pid, "vm_rss": size, **more}, "args": ["x"], "env": ["A=b"]}


def test_biggest_process_is_chosen_and_never_pid_one():
    dump = [process(1, 999999), process(7, 10, ppid=1), process(9, 500, ppid=7), process(11, 20, ppid=9)]
    assert choose_victim(answer(dump)) == [9, 7]
    assert choose_victim(answer([process(1, 999999)])) == []
    assert choose_victim(answer([])) == []


def test_line_of_ancestors_ends():
    assert choose_victim(answer([process(8, 5, ppid=9), process(9, 1, ppid=8)])) == [8, 9]
    long = [process(pid, pid, ppid=pid - 1) for pid in range(2, 500)]
    assert len(choose_victim(answer(long))) <= 65


def test_odd_processes_are_passed_over():
    odd = [None, 5, {}, {"status": None}, process("9", 5), process(True, 9), process(-3, 9), process(2**40, 9)]
    odd += [process(3, "big"), process(4, -1), {"status": {"pid": 6}}]
    assert choose_victim(answer([*odd, process(8, 1, ppid="x")])) == [8]
    with pytest.raises(TypeError):  # the worker's question fails, and counts as no answer
        choose_victim(answer([process(8, 1, ppid=[])]))


@pytest.mark.parametrize(
    "dump", [b"", b"{}", b"[]", b'{"success": false}', b'{"success": true, "result": {}}', b"\xff"]
)
def test_what_is_no_dump_is_refused(dump):
    with pytest.raises(ValueError):
        choose_victim(dump)


async def ask(worker: VictimWorker, reply: bytes, *, repeat: int = 1) -> tuple[int, ...] | None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def sentry():
        loop = asyncio.get_running_loop()
        with theirs:
            await loop.sock_recv(theirs, 65536)
            try:
                for _ in range(repeat):
                    await loop.sock_sendall(theirs, reply)
            except OSError:
                pass

    task = asyncio.create_task(sentry())
    try:
        return await worker.choose(ours)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_worker_answers_one_number():
    worker = VictimWorker()
    try:
        assert await ask(worker, answer([process(1, 5), process(9, 500)])) == (9,)
        assert await ask(worker, answer([])) == ()
        # A sandbox that never ends its answer, or answers rubbish, gets none, and the next is served as before.
        results = await asyncio.gather(
            ask(worker, b"x" * (1 << 20), repeat=100),
            ask(worker, b"{" * 100000),
            ask(worker, answer([process(3, 4)])),
        )
        assert results == [None, None, (3,)]
    finally:
        await worker.close()


async def test_dead_worker_is_started_again():
    worker = VictimWorker()
    try:
        await worker.start()
        worker._process.kill()
        await worker._process.wait()
        assert await ask(worker, answer([process(3, 4)])) == (3,)
    finally:
        await worker.close()
