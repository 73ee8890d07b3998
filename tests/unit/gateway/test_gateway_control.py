"""The control socket, the ends of sandboxes, caps and budgets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from gateway_rig import SANDBOX, LocalDialler, Rig, TicketMint, error_code, open_rig

from cpuos.gateway.ending import CommandEnding
from cpuos.gateway.limits import GatewayLimits
from cpuos.gateway.spool import SpoolLimits
from cpuos.testing.waiting import until
from cpuos.types.frames import FrameDecoder, FrameKind


async def detach(rig: Rig, reason: str, text: str = "") -> None:
    answer = await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json={"reason": reason, "text": text})
    assert answer.status_code == 204, answer.text


async def test_attach_is_idempotent_and_fenced(rig: Rig) -> None:
    answer = await rig.attach()
    assert answer.status_code == 200
    assert answer.json()["contract"] == 1
    assert (await rig.attach(generation=2)).status_code == 200
    answer = await rig.attach(generation=1)
    assert (answer.status_code, error_code(answer)) == (409, "stale_generation")
    async with rig.client() as old, rig.client(gen=2) as new:
        assert error_code(await old.call("GET", "/commands")) == "stale_generation"
        assert (await new.exec("echo hi")).stdout == b"hi\n"


async def test_attach_where_nobody_answers(tmp_path: Path) -> None:
    async with open_rig(tmp_path, LocalDialler(address=("127.0.0.1", 1))) as rig:
        answer = await rig.attach(wait_s=0.1)
        assert (answer.status_code, error_code(answer)) == (504, "agent_unresponsive")
        async with rig.client() as client:
            assert error_code(await client.call("GET", "/commands")) == "sandbox_not_found"


async def assert_readable(rig: Rig, command: str, code: str) -> None:
    """A ticket for the records of an ended sandbox opens these and nothing else."""
    async with rig.client(scope=["records"]) as reader:
        assert (await reader.call("GET", f"/commands/{command}/output")).content == b"up\n"
        assert (await reader.frames("GET", f"/commands/{command}/stream")).stdout == b"up\n"
        for path in ("", f"/{command}", f"/{command}/wait"):
            assert (await reader.call("GET", f"/commands{path}")).status_code == 200
        for method, path in [("POST", "/commands"), ("POST", f"/commands/{command}/kill"), ("GET", "/files?path=/x")]:
            refused = await reader.call(method, path, json={"command": "true"} if method == "POST" else None)
            assert (refused.status_code, error_code(refused)) == (410, code)
            assert refused.json()["error"]["why"] == "because"


async def test_a_ticket_for_records_starts_nothing_in_a_living_sandbox(rig: Rig) -> None:
    async with rig.client(scope=["records"]) as reader:
        assert (await reader.call("GET", "/commands")).status_code == 200
        assert error_code(await reader.call("POST", "/commands", json={"command": "true"})) == "forbidden"


async def test_output_of_ended_sandboxes_is_bounded_together(rig: Rig) -> None:
    sandboxes = rig.gateway.sandboxes
    async with rig.client() as client:
        ended = (await client.exec("echo up")).end["id"]
        sandboxes._spool_limits = SpoolLimits(ended_bytes=2)
        sandboxes.bound_ended()
        assert (await client.call("GET", f"/commands/{ended}/output")).content == b"up\n"  # it lives
        await detach(rig, "stopped", "because")
        sandboxes.bound_ended()
        assert error_code(await client.call("GET", f"/commands/{ended}/output")) == "output_lost"
        assert (await client.call("GET", f"/commands/{ended}")).json()["exit_code"] == 0


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("stopped", "killed", "sandbox_stopped"), ("lost", "sandbox_lost", "sandbox_lost")],
)
async def test_the_end_of_a_sandbox_ends_its_commands(rig: Rig, reason: str, status: str, code: str) -> None:
    async with rig.client() as client:
        following = asyncio.create_task(client.exec("echo up; sleep 100"))
        await client.has_said(len(b"up\n"))
        await detach(rig, reason, "because")
        stream = await following
        assert (stream.stdout, stream.end["status"], stream.end["reason"]) == (b"up\n", status, "because")
        answer = await client.call("POST", "/commands", json={"command": "true"})
        assert (answer.status_code, error_code(answer)) == (410, code)
        assert error_code(await client.call("GET", "/files/stat?path=/")) == code
        output = await client.call("GET", f"/commands/{stream.end['id']}/output")
        assert output.content == b"up\n"
        await assert_readable(rig, stream.end["id"], code)
        assert error_code(await rig.attach()) == code
        assert (await rig.control.delete(f"/v1/sandboxes/{SANDBOX}")).status_code == 204
        assert (await rig.control.delete(f"/v1/sandboxes/{SANDBOX}")).status_code == 204
        assert error_code(await client.call("GET", "/commands")) == "sandbox_not_found"
        assert not os.listdir(rig.folder / "state" / "sandboxes")


async def test_wrong_control_calls(rig: Rig) -> None:
    for method, path, body in [
        ("POST", "/v1/sandboxes/..%2f..%2fetc/attach", {"generation": 1}),
        ("POST", f"/v1/sandboxes/{'A' * 20}/attach", {"generation": 1}),
        ("POST", f"/v1/sandboxes/{SANDBOX}/attach", {"generation": 0}),
        ("POST", f"/v1/sandboxes/{SANDBOX}/detach", {"reason": "bored"}),
        ("POST", "/v1/tickets/revoke", {}),
        ("POST", "/v1/tickets/revoke", {"jti": "a", "actor": "b"}),
    ]:
        answer = await rig.control.request(method, path, json=body)
        assert error_code(answer) in ("invalid_request", "not_found"), (path, answer.text)
    assert (await rig.control.post(f"/v1/sandboxes/{'z' * 20}/detach", json={"reason": "lost"})).status_code == 204


async def test_the_journal_is_read_in_pages(rig: Rig) -> None:
    async with rig.client() as client:
        for _ in range(3):
            await client.exec("true")
    seen, after = [], 0
    while True:
        page = (await rig.control.get(f"/v1/journal?after={after}&limit=2")).json()
        if not page["entries"]:
            break
        seen += page["entries"]
        assert page["next"] == page["entries"][-1]["seq"]
        after = page["next"]
    assert [entry["seq"] for entry in seen] == [1, 2, 3, 4, 5, 6]
    assert {entry["action"] for entry in seen} == {"command.start"}


async def test_memory_ran_out(rig: Rig) -> None:
    async with rig.client() as client:
        victim = await client.spawn("exec sleep 100")
        bystander = await client.spawn("sleep 0.6")
        pid = rig.gateway.sandboxes.get(SANDBOX).runs[victim].recorded.record.pid
        answer = await rig.control.post(f"/v1/sandboxes/{SANDBOX}/oom", json={"pids": [99999, pid, 1]})
        assert answer.json() == {"commands": [victim]}
        os.kill(pid, 9)
        end = await client.wait(victim)
        assert (end["status"], end["signal"], end["exit_code"]) == ("oom_killed", 9, None)
        assert (await client.wait(bystander))["status"] == "exited"


async def test_memory_ran_out_and_the_host_was_faster(rig: Rig) -> None:
    """It says only that one of them is gone; the word may come after the end."""
    async with rig.client() as client:
        victim = await client.spawn("exec sleep 100")
        bystander = await client.spawn("sleep 0.6")
        os.kill(rig.gateway.sandboxes.get(SANDBOX).runs[victim].recorded.record.pid, 9)
        await asyncio.sleep(0.1)
        answer = await rig.control.post(f"/v1/sandboxes/{SANDBOX}/oom", json={"pids": []})
        assert set(answer.json()["commands"]) == {victim, bystander}
        end = await client.wait(victim)
        assert (end["status"], end["limit_reached"]["limit"]) == ("oom_killed", "memory")
        end = await client.wait(bystander)
        assert (end["status"], end["limit_reached"]) == ("exited", None)


async def test_a_kill_that_nobody_explains_is_a_signal(rig: Rig) -> None:
    async with rig.client() as client:
        end = (await client.exec("kill -9 $$")).end
        assert (end["status"], end["signal"]) == ("signalled", 9)


async def test_caps_name_the_limit_and_leave_the_rest_free(agent: int, dialler: LocalDialler, tmp_path: Path) -> None:
    limits = GatewayLimits(commands=2, streams=1, watches=1, transfers=1)
    async with open_rig(tmp_path, dialler, limits=limits) as rig:
        await rig.attach()
        async with rig.client() as client:
            running = [await client.spawn("sleep 100") for _ in range(2)]
            answer = await client.call("POST", "/commands", json={"command": "true", "detach": True, "cwd": "/"})
            assert (answer.status_code, error_code(answer)) == (429, "limit_reached")
            assert answer.json()["error"]["details"]["limit"] == "commands"
            following = asyncio.create_task(client.frames("GET", f"/commands/{running[0]}/stream"))
            await until(lambda: rig.gateway.sandboxes.get(SANDBOX).slots._taken.get("streams"))
            answer = await client.call("GET", f"/commands/{running[1]}/stream")
            assert answer.json()["error"]["details"]["limit"] == "streams"
            # Kill, stat and wait get through.
            assert (await client.call("GET", "/files/stat?path=/")).status_code == 200
            assert (await client.wait(running[1], timeout_s=0))["status"] == "running"
            for command_id in running:
                killed = await client.call("POST", f"/commands/{command_id}/kill")
                assert killed.json()["status"] == "killed"
            assert (await following).end["status"] == "killed"
            assert (await client.exec("true")).end["exit_code"] == 0


async def test_a_sandbox_over_its_budget_drops_the_oldest_outputs(
    agent: int, dialler: LocalDialler, tmp_path: Path
) -> None:
    spool = SpoolLimits(head_bytes=4 << 20, tail_bytes=4 << 20, sandbox_bytes=20 << 20, records=6)
    async with open_rig(tmp_path, dialler, spool_limits=spool) as rig:
        await rig.attach()
        async with rig.client() as client:
            ids = [(await client.exec("head -c 7000000 /dev/zero", query="?tail=0")).end["id"] for _ in range(4)]
            answer = await client.call("GET", f"/commands/{ids[0]}/output")
            assert (answer.status_code, error_code(answer)) == (410, "output_lost")
            first = (await client.call("GET", f"/commands/{ids[0]}")).json()
            assert (first["stdout_bytes"], first["stdout_dropped_bytes"]) == (7000000, 7000000)
            stream = await client.frames("GET", f"/commands/{ids[0]}/stream")
            assert stream.gaps == [{"stream": "stdout", "from": 0, "to": 7000000}]
            assert len((await client.call("GET", f"/commands/{ids[3]}/output")).content) == 7000000
            stored = sum(entry.stat().st_blocks * 512 for entry in tmp_path.joinpath("state").rglob("std*"))
            assert stored <= 21 << 20
            for _ in range(5):
                await client.exec("true")

            async def few_are_left() -> bool:  # a record is saved a moment after its end was told
                return len((await client.call("GET", "/commands")).json()["commands"]) == 6

            await until(few_are_left)
            assert error_code(await client.call("GET", f"/commands/{ids[0]}")) == "command_not_found"


async def test_the_dropped_middle_is_told_everywhere(agent: int, dialler: LocalDialler, tmp_path: Path) -> None:
    spool = SpoolLimits(head_bytes=1000, tail_bytes=2000)
    async with open_rig(tmp_path, dialler, spool_limits=spool) as rig:
        await rig.attach()
        async with rig.client() as client:
            whole = b"".join(b"%d\n" % n for n in range(1, 1_000_001))
            command_id = await client.spawn("seq 1 1000000")
            end = await client.wait(command_id)
            gap = (1000, len(whole) - 2000)
            assert end["stdout_dropped_bytes"] == gap[1] - gap[0]
            stream = await client.frames("GET", f"/commands/{command_id}/stream")
            assert stream.gaps == [{"stream": "stdout", "from": gap[0], "to": gap[1]}]
            assert stream.stdout == whole[:1000] + whole[-2000:]
            assert stream.in_order()
            for offset, limit, expected, told in [
                (0, 500, whole[:500], False),
                (0, None, whole[:1000] + whole[-2000:], True),
                (999, 10, whole[999:1000] + whole[-2000:-1991], True),
                (5000, 4, whole[-2000:-1996], True),
                (gap[1], None, whole[-2000:], False),
            ]:
                query = f"?offset={offset}" + (f"&limit={limit}" if limit is not None else "")
                answer = await client.call("GET", f"/commands/{command_id}/output{query}")
                assert answer.content == expected
                assert answer.headers.get("x-output-gap") == (f"{gap[0]}-{gap[1]}" if told else None)


async def test_a_slow_reader_holds_output_back_before_it_loses_any(
    agent: int, dialler: LocalDialler, tmp_path: Path
) -> None:
    spool = SpoolLimits(head_bytes=1 << 20, tail_bytes=16 << 20)
    async with open_rig(tmp_path, dialler, spool_limits=spool) as rig:
        await rig.attach()
        async with rig.client() as client:
            body = {"command": "head -c 150000000 /dev/zero", "cwd": "/"}
            size, seen = 0, set()
            async with client.http.stream("POST", client.base + "/commands", json=body) as answer:
                decoder = FrameDecoder()
                async for piece in answer.aiter_raw():
                    for frame in decoder.feed(piece):
                        seen.add(frame.kind)
                        size += len(frame.payload) if frame.kind is FrameKind.STDOUT else 0
                    await asyncio.sleep(0.0005)
            assert FrameKind.GAP not in seen
            assert size == 150000000


async def test_a_crash_between_intent_and_record(agent: int, dialler: LocalDialler, tmp_path: Path) -> None:
    """Nobody records the command, so it does not go on; its outcome is unknown."""
    mint = TicketMint(tmp_path)
    async with open_rig(tmp_path, dialler, mint=mint) as rig:
        await rig.attach()
        async with rig.client() as client:
            command_id = await client.spawn("sleep 100")
        pid = rig.gateway.sandboxes.get(SANDBOX).runs[command_id].recorded.record.pid
    os.unlink(tmp_path / "state" / "sandboxes" / SANDBOX / "commands" / f"{command_id}.jsonl")
    async with open_rig(tmp_path, dialler, mint=mint) as rig, rig.client() as client:
        assert error_code(await client.call("GET", f"/commands/{command_id}")) == "command_not_found"
        entries = [entry for entry in await rig.journal() if entry["target"] == command_id]
        assert [(entry["phase"], entry["result"]) for entry in entries] == [("intent", None), ("outcome", "unknown")]
        assert (await rig.attach()).status_code == 200
        await until(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_a_crash_between_outcome_and_record(
    agent: int, dialler: LocalDialler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent still knows the end: it is recorded again, and journaled once."""
    mint = TicketMint(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CommandEnding, "save", lambda self: None)
        async with open_rig(tmp_path, dialler, mint=mint) as rig:
            await rig.attach()
            async with rig.client() as client:
                end = (await client.exec("echo kept; exit 6")).end
    async with open_rig(tmp_path, dialler, mint=mint) as rig, rig.client() as client:
        again = await client.wait(end["id"])
        assert (again["status"], again["exit_code"], again["stdout_bytes"]) == ("exited", 6, 5)
        assert (await client.call("GET", f"/commands/{end['id']}/output")).content == b"kept\n"
        entries = [entry["phase"] for entry in await rig.journal() if entry["target"] == end["id"]]
        assert entries == ["intent", "outcome"]


async def test_what_cannot_be_recorded_does_not_happen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig.client() as client:

        def full(*arguments: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("cpuos.gateway.journal.os.write", full)
            answer = await client.call("POST", "/commands", json={"command": f"touch {rig.folder}/ran", "cwd": "/"})
            assert (answer.status_code, error_code(answer)) == (503, "gateway_unavailable")
            removed = await client.call("DELETE", f"/files?path={rig.folder}/users")
            assert error_code(removed) == "gateway_unavailable"
        assert "ran" not in os.listdir(rig.folder)
        assert "users" in os.listdir(rig.folder)
        assert (await client.exec("true")).end["exit_code"] == 0


async def test_a_full_disk_blocks_the_program_and_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig.client() as client:
        real, refused = os.pwrite, []

        def full(*arguments: object) -> int:
            if len(refused) < 3:
                refused.append(1)
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr("cpuos.gateway.spool.os.pwrite", full)
        stream = await client.exec("seq 1 50000")
        assert stream.stdout == b"".join(b"%d\n" % n for n in range(1, 50001))
        assert len(refused) == 3
