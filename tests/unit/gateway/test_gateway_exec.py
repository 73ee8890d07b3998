"""Commands through the gateway, against the real agent on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from gateway_rig import DataClient, Rig, error_code

from cpuos.types.frames import FrameKind


async def test_streams_and_exit_code_are_apart(client: DataClient) -> None:
    stream = await client.exec("echo out; echo err >&2; exit 7")
    assert (stream.stdout, stream.stderr) == (b"out\n", b"err\n")
    assert stream.frames[0].kind is FrameKind.STARTED
    end = stream.end
    assert (end["status"], end["exit_code"], end["stdout_bytes"], end["stderr_bytes"]) == ("exited", 7, 4, 4)
    assert end["duration_s"] > 0


async def test_missing_program_ends_as_a_shell_tells_it(client: DataClient) -> None:
    end = (await client.exec(["no-such-program-here"])).end
    assert (end["status"], end["exit_code"]) == ("exited", 127)
    assert "no-such-program-here" in end["reason"]


async def test_unknown_user_and_folder_are_errors(client: DataClient) -> None:
    answer = await client.call("POST", "/commands", json={"command": "true", "cwd": "/", "user": "nobody-here"})
    assert (answer.status_code, error_code(answer)) == (422, "user_not_found")
    answer = await client.call("POST", "/commands", json={"command": "true", "cwd": "/no/such/folder"})
    assert (answer.status_code, error_code(answer)) == (404, "file_not_found")
    listed = await client.call("GET", "/commands")
    assert listed.json()["commands"] == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": "true", "argv": ["true"]},
        {"argv": []},
        {"command": "true", "timeout_s": -1},
        {"command": "true", "unknown": 1},
        {"command": "a\x00b"},
        {"command": "true", "env": {"A=B": "c"}},
        {"command": "true", "user": "Root;"},
        [],
    ],
)
async def test_wrong_bodies_are_refused_by_field(client: DataClient, body: object) -> None:
    answer = await client.call("POST", "/commands", json=body)
    assert (answer.status_code, error_code(answer)) == (422, "invalid_request")


async def test_a_body_over_its_limit_is_refused(client: DataClient) -> None:
    answer = await client.call("POST", "/commands", content=b" " * (3 << 20))
    assert (answer.status_code, error_code(answer)) == (413, "body_too_large")

    async def chunks():
        for _ in range(40):
            yield b" " * (64 << 10)

    answer = await client.call("POST", "/commands", content=chunks())
    assert (answer.status_code, error_code(answer)) == (413, "body_too_large")


async def test_timeout_keeps_output_and_ends_the_tree(client: DataClient, tmp_path: Path) -> None:
    said, limit_s = tmp_path / "said", 0.5
    while not said.exists():  # a machine that stands still gives it no time to say anything
        async with asyncio.timeout(30):
            stream = await client.exec(f"echo before; touch {said}; sleep 300 & sleep 300", timeout_s=limit_s)
        assert stream.end["status"] == "timed_out"
        limit_s *= 4
    assert stream.stdout == b"before\n"


async def test_detach_wait_get_and_list(client: DataClient) -> None:
    command_id = await client.spawn("echo one; read; echo two", stdin="open")
    assert (await client.call("GET", f"/commands/{command_id}")).json()["status"] == "running"
    await client.call("POST", f"/commands/{command_id}/stdin?offset=0&end=true", content=b"go on\n")
    end = await client.wait(command_id)
    assert (end["status"], end["stdout_bytes"]) == ("exited", 8)
    listed = (await client.call("GET", "/commands")).json()["commands"]
    assert [command["id"] for command in listed] == [command_id]
    answer = await client.call("GET", "/commands/aaaaaaaaaaaaaaaa")
    assert (answer.status_code, error_code(answer)) == (404, "command_not_found")


async def test_wait_returns_the_running_record_when_its_time_is_over(client: DataClient) -> None:
    command_id = await client.spawn("sleep 60")
    began = time.monotonic()
    assert (await client.wait(command_id, timeout_s=0.2))["status"] == "running"
    assert time.monotonic() - began < 20
    await client.call("POST", f"/commands/{command_id}/kill")


async def test_kill_answers_the_end_and_others_see_it(client: DataClient, rig: Rig) -> None:
    following = asyncio.create_task(client.exec("echo up; sleep 300 & sleep 300"))
    command_id = await client.has_said(len(b"up\n"))
    answer = await client.call("POST", f"/commands/{command_id}/kill", json={"signal": "KILL", "reason": "enough"})
    assert (answer.status_code, answer.json()["status"]) == (200, "killed")
    stream = await following
    assert (stream.stdout, stream.end["status"]) == (b"up\n", "killed")
    again = await client.call("POST", f"/commands/{command_id}/kill")
    assert (again.status_code, again.json()["status"]) == (200, "killed")
    kills = [entry for entry in await rig.journal() if entry["action"] == "command.kill"]
    assert [(entry["phase"], entry["result"]) for entry in kills] == [("intent", None), ("outcome", "ok")]
    assert kills[0]["detail"] == {"signal": 9, "reason": "enough"}


async def test_other_signals_reach_the_program(client: DataClient) -> None:
    command_id = await client.spawn("trap 'echo got; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    await client.has_said(len(b"ready\n"), command_id=command_id)
    await client.call("POST", f"/commands/{command_id}/kill", json={"signal": "SIGTERM"})
    end = await client.wait(command_id)
    assert (end["status"], end["exit_code"]) == ("exited", 3)
    answer = await client.call("POST", f"/commands/{command_id}/kill", json={"signal": "NOPE"})
    assert error_code(answer) == "invalid_request"


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, (5 << 20) + 7])
async def test_stdin_bytes_are_exact(client: DataClient, size: int) -> None:
    data = os.urandom(size)
    command_id = await client.spawn(["cat"], stdin="open")
    answer = await client.call("POST", f"/commands/{command_id}/stdin?offset=0&end=true", content=data)
    assert answer.json()["offset"] == size
    end = await client.wait(command_id)
    assert (end["status"], end["exit_code"], end["stdout_bytes"]) == ("exited", 0, size)
    output = await client.call("GET", f"/commands/{command_id}/output")
    assert hashlib.sha256(output.content).digest() == hashlib.sha256(data).digest()


async def test_stdin_repeats_are_skipped_and_holes_refused(client: DataClient) -> None:
    command_id = await client.spawn(["cat"], stdin="open")
    await client.call("POST", f"/commands/{command_id}/stdin?offset=0", content=b"abc")
    await client.call("POST", f"/commands/{command_id}/stdin?offset=1", content=b"bcde")
    answer = await client.call("POST", f"/commands/{command_id}/stdin?offset=9", content=b"x")
    assert (answer.status_code, answer.json()["error"]["details"]["offset"]) == (409, 5)
    await client.call("POST", f"/commands/{command_id}/stdin?offset=5&end=true", content=b"")
    await client.wait(command_id)
    assert (await client.call("GET", f"/commands/{command_id}/output")).content == b"abcde"


async def test_stdin_of_a_program_that_does_not_read_it(client: DataClient) -> None:
    command_id = await client.spawn("exit 2", stdin="open")
    answer = await client.call("POST", f"/commands/{command_id}/stdin?offset=0&end=true", content=b"x" * (4 << 20))
    assert answer.status_code == 200
    assert answer.json()["open"] is False
    assert (await client.wait(command_id))["exit_code"] == 2


async def test_idempotency_key_attaches_to_the_same_command(client: DataClient) -> None:
    headers = {"Idempotency-Key": "order-1"}
    both = await asyncio.gather(*(client.exec("echo $$; sleep 0.3", headers=headers) for _ in range(2)))
    assert both[0].end["id"] == both[1].end["id"]
    assert both[0].stdout == both[1].stdout
    answer = await client.call("POST", "/commands", json={"command": "echo other", "cwd": "/"}, headers=headers)
    assert (answer.status_code, error_code(answer)) == (409, "idempotency_mismatch")


async def test_resume_from_any_offset(client: DataClient) -> None:
    whole = await client.exec("seq 1 20000; seq 1 300 >&2")
    assert whole.in_order()
    command_id, size = whole.end["id"], len(whole.stdout)
    for stdout, stderr in [(0, 0), (1, 5), (4095, 100), (size - 1, 0), (size, len(whole.stderr))]:
        stream = await client.frames("GET", f"/commands/{command_id}/stream?stdout={stdout}&stderr={stderr}")
        assert stream.stdout == whole.stdout[stdout:]
        assert stream.stderr == whole.stderr[stderr:]
        assert stream.end == whole.end
    answer = await client.call("GET", f"/commands/{command_id}/stream?stdout={size + 1}")
    assert error_code(answer) == "invalid_request"


async def test_a_client_cut_in_mid_output_resumes_without_loss(client: DataClient) -> None:
    body = {"command": "for i in $(seq 40); do seq 1 2000; sleep 0.01; done", "cwd": "/"}
    async with client.http.stream("POST", client.base + "/commands", json=body) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        command_id = (await client.call("GET", "/commands")).json()["commands"][0]["id"]
        await anext(pieces)
        await pieces.aclose()
    stream = await client.frames("GET", f"/commands/{command_id}/stream")
    assert stream.stdout == b"".join(b"%d\n" % n for n in range(1, 2001)) * 40
    assert stream.in_order()


async def test_an_end_with_nobody_there_is_recorded(client: DataClient, rig: Rig) -> None:
    body = {"command": "sleep 0.3; echo done; exit 4", "cwd": "/"}
    async with client.http.stream("POST", client.base + "/commands", json=body) as answer:
        await anext(answer.aiter_raw())
    command_id = (await client.call("GET", "/commands")).json()["commands"][0]["id"]
    assert (await client.wait(command_id))["exit_code"] == 4
    entries = [entry for entry in await rig.journal() if entry["target"] == command_id]
    assert [entry["phase"] for entry in entries] == ["intent", "outcome"]
    assert entries[1]["intent"] == entries[0]["seq"]
    assert entries[1]["detail"]["exit_code"] == 4
    assert entries[0]["detail"]["argv"] == ["/bin/bash", "-c", "sleep 0.3; echo done; exit 4"]


async def test_tail_gives_head_and_tail_and_names_the_middle(client: DataClient) -> None:
    stream = await client.exec("seq 1 200000", query="?tail=1000")
    whole = b"".join(b"%d\n" % n for n in range(1, 200001))
    assert stream.gaps == [{"stream": "stdout", "from": 1000, "to": len(whole) - 1000}]
    assert stream.stdout == whole[:1000] + whole[-1000:]
    assert stream.end["stdout_dropped_bytes"] == 0
    short = await client.exec("printf 12345", query="?tail=3")
    assert short.stdout == b"12345"
    assert short.gaps == []


async def test_output_by_offset_and_limit(client: DataClient) -> None:
    command_id = (await client.exec("printf 0123456789; printf err >&2")).end["id"]
    answer = await client.call("GET", f"/commands/{command_id}/output?stream=stdout&offset=2&limit=3")
    assert (answer.content, answer.headers["x-output-next"], answer.headers["x-output-total"]) == (b"234", "5", "10")
    assert "x-output-gap" not in answer.headers
    answer = await client.call("GET", f"/commands/{command_id}/output?stream=stderr")
    assert answer.content == b"err"
    answer = await client.call("GET", f"/commands/{command_id}/output?offset=10")
    assert (answer.content, answer.headers["x-output-next"]) == (b"", "10")
    for query in ("?offset=11", "?stream=other", "?offset=-1", "?offset=x"):
        answer = await client.call("GET", f"/commands/{command_id}/output{query}")
        assert error_code(answer) == "invalid_request"


async def test_stderr_comes_through_while_stdout_floods(client: DataClient) -> None:
    body = {"command": "yes | head -c 60000000 & sleep 0.05; echo now >&2; wait", "cwd": "/"}
    stream = await client.frames("POST", "/commands", json=body)
    kinds = [frame.kind for frame in stream.frames]
    assert kinds.index(FrameKind.STDERR) < len(kinds) - 2
    assert len(stream.stdout) == 60000000
    assert stream.in_order()


async def test_a_long_command_line_is_cut_in_the_record_and_runs_whole(client: DataClient) -> None:
    stream = await client.exec(["printf", "%s", "x" * 100_000])
    assert len(stream.stdout) == 100_000
    assert len(json.dumps(stream.end["argv"])) < 10_000
    assert "100002 characters in 2 words" in stream.end["argv"][-1] or "100000" in stream.end["argv"][-1]


async def test_unknown_routes_and_methods(client: DataClient) -> None:
    for method, path in [("GET", "/nothing"), ("PUT", "/commands"), ("GET", "/commands/x/y/z")]:
        answer = await client.call(method, path)
        assert (answer.status_code, error_code(answer)) == (404, "not_found")


async def test_too_long_a_command_line_is_refused_before_it_starts(client: DataClient, rig: Rig) -> None:
    answer = await client.call("POST", "/commands", json={"argv": ["echo", "\x01" * 500_000], "cwd": "/"})
    assert (answer.status_code, error_code(answer)) in [(422, "invalid_request"), (413, "body_too_large")]
    assert await rig.journal() == []
