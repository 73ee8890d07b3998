"""Which limit a command met: asked of the node, told with its end and in the journal, and never in the end's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import SANDBOX, DataClient, LocalDialler, Rig, error_code, open_rig

from cpuos.errors import LimitReached, Unavailable
from cpuos.gateway.commands import CommandRun
from cpuos.testing.waiting import until
from cpuos.types.limits import FullPlace, LimitFacts, SandboxLimit

NO_SPACE = "echo 'dd: error writing: No space left on device' >&2"
DISK = FullPlace(limit=SandboxLimit.DISK, value=64 << 20, path="/workspace")
PROCESSES = FullPlace(limit=SandboxLimit.PROCESSES, value=100)


class Reader:
    """Plays the node."""

    def __init__(self) -> None:
        self.full: list[FullPlace] = []
        self.asked: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.silent = False

    async def limits(self, sandbox_id: str, generation: int) -> LimitFacts:
        self.asked.append((sandbox_id, generation))
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return LimitFacts(
            memory_bytes=1 << 29, disk_bytes=64 << 20, tmp_bytes=1 << 27, processes=100, full=list(self.full)
        )


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
async def rig(agent: int, dialler: LocalDialler, tmp_path: Path, reader: Reader) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, dialler, limit_reader=reader) as rig:
        assert (await rig.attach()).status_code == 200
        yield rig


async def run(client: DataClient, command: str, **options: Any) -> dict[str, Any]:
    return (await client.exec(command, **options)).end


async def test_a_full_place_is_named_with_what_can_be_done(rig: Rig, client: DataClient, reader: Reader) -> None:
    reader.full = [DISK]
    end = await run(client, f"{NO_SPACE}; exit 1")
    reached = end["limit_reached"]
    assert (end["status"], end["exit_code"]) == ("exited", 1)
    assert (reached["limit"], reached["value"], reached["path"], reached["seen_by"]) == (
        "disk",
        64 << 20,
        "/workspace",
        "host",
    )
    assert end["reason"] == reached["reason"]
    assert "64 MiB" in reached["reason"]
    assert "Remove files" in reached["reason"]
    assert reader.asked[0] == (SANDBOX, 1)
    (entry,) = [entry for entry in await rig.journal() if entry["action"] == "limit.reached"]
    assert (entry["actor"], entry["phase"], entry["sandbox"], entry["detail"]["limit"]) == (
        "system",
        "outcome",
        SANDBOX,
        "disk",
    )
    assert entry["detail"]["command"] == end["id"]


async def test_what_was_full_as_it_complained_stays_told(client: DataClient, reader: Reader) -> None:
    """It tidies up behind itself, as many programs do, and by its end there is room."""
    reader.full = [DISK]
    running = asyncio.create_task(run(client, f"{NO_SPACE}; sleep 0.5; exit 3"))
    await until(lambda: reader.asked)
    reader.full = []
    assert (await running)["limit_reached"]["path"] == "/workspace"


async def test_one_that_says_nothing_is_told_what_was_full(client: DataClient, reader: Reader) -> None:
    reader.full = [PROCESSES]
    end = await run(client, "exit 1")
    assert end["limit_reached"]["limit"] == "processes"
    assert end["reason"].startswith("As the command failed: ")


async def test_success_is_not_blamed(client: DataClient, reader: Reader) -> None:
    reader.full = [DISK]
    end = await run(client, "echo fine")
    assert (end["limit_reached"], end["reason"]) == (None, "")
    assert reader.asked == []


async def test_success_after_a_complaint_has_the_limit_and_no_reason(client: DataClient, reader: Reader) -> None:
    reader.full = [DISK]
    end = await run(client, f"{NO_SPACE}; sleep 0.1; true")
    assert (end["limit_reached"]["limit"], end["reason"]) == ("disk", "")


@pytest.mark.parametrize(
    ("words", "limit", "value"),
    [
        ("OSError: [Errno 24] Too many open files: 'x'", "open_files", 65536),
        ("RuntimeError: can't start new thread", "processes", 100),
        ("bash: fork: retry: Resource temporarily unavailable", "processes", 100),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "processes", 100),
        ("cp: error writing '/tmp/x': No space left on device", "tmp", 1 << 27),
    ],
)
async def test_words_without_a_fact_are_told_as_words(client: DataClient, words: str, limit: str, value: int) -> None:
    end = await run(client, f'echo "{words}" >&2; exit 1')
    reached = end["limit_reached"]
    assert (reached["limit"], reached["value"], reached["seen_by"]) == (limit, value, "output")
    assert reached["reason"].startswith("By what the program wrote: ")


async def test_what_stands_in_stdout_is_not_an_error(client: DataClient) -> None:
    assert (await run(client, "echo 'No space left on device'; exit 1"))["limit_reached"] is None


async def test_an_ordinary_failure_has_no_limit(client: DataClient) -> None:
    end = await run(client, "ls /nowhere-at-all")
    assert end["exit_code"] != 0
    assert (end["limit_reached"], end["reason"]) == (None, "")


async def test_a_timeout_is_a_limit(client: DataClient) -> None:
    end = await run(client, "sleep 60", timeout_s=0.3)
    assert (end["status"], end["limit_reached"]["limit"], end["limit_reached"]["value"]) == (
        "timed_out",
        "timeout",
        0.3,
    )


async def test_a_node_that_is_silent_or_fails_holds_up_no_end(client: DataClient, reader: Reader) -> None:
    reader.silent = True
    async with asyncio.timeout(10):
        end = await run(client, f"{NO_SPACE}; exit 1")
    assert (end["exit_code"], end["limit_reached"]["seen_by"]) == (1, "output")
    reader.silent, reader.error = False, Unavailable("cannot reach the node daemon", code="node_unavailable")
    assert (await run(client, "exit 1"))["limit_reached"] is None


async def test_commands_of_a_session_that_is_over(rig: Rig, client: DataClient) -> None:
    running = await client.spawn("sleep 100")
    body = {"reason": "stopped", "text": "its time of 3s ended", "session_s": 3}
    assert (await rig.control.post(f"/v1/sandboxes/{SANDBOX}/detach", json=body)).status_code == 204
    end = await client.wait(running)
    assert (end["status"], end["limit_reached"]["limit"], end["limit_reached"]["value"]) == ("killed", "session", 3)


async def test_memory_of_a_process_that_no_command_owns_is_in_the_journal(rig: Rig) -> None:
    await rig.control.post(f"/v1/sandboxes/{SANDBOX}/oom", json={"pids": [99999, 1]})
    entries = [entry for entry in await rig.journal() if entry["action"] == "limit.reached"]
    assert [entry["detail"]["limit"] for entry in entries] == ["memory"]


async def test_a_refused_start_names_the_limit(
    rig: Rig, client: DataClient, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: CommandRun, body: bytes) -> None:
        raise LimitReached("cannot start 'true'", "fork failed", details={"agent_code": "limit_reached"})

    monkeypatch.setattr(CommandRun, "start", refuse)
    reader.full = [PROCESSES]
    answer = await client.call("POST", "/commands", json={"command": "true", "cwd": "/"})
    assert (answer.status_code, error_code(answer)) == (429, "limit_reached")
    error = answer.json()["error"]
    assert (error["details"]["limit"], error["details"]["value"]) == ("processes", 100)
    assert "max_processes" in error["why"]
