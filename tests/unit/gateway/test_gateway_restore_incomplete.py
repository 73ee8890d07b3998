"""A real agent that comes back without something it had when it was frozen: it stays frozen, and says what is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_rig import SANDBOX, DataClient, LocalDialler, Rig, error_code, go_agent

from cpuos.errors import AgentFailure
from cpuos.gateway.agent.answers import Hello, read_answer, refusal
from cpuos.testing.waiting import until

FREEZE = "f" * 32
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces")


@pytest.fixture
async def agent(agent_binary: Path, tmp_path: Path, dialler: LocalDialler) -> AsyncIterator[int]:
    async with go_agent(agent_binary, tmp_path, dialler, first=True) as pid:
        yield pid


def find(word: str) -> int | None:
    """The host's number of the process with exactly these words."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().split("\0")[:-1] == word.split():
                return int(path.parent.name)
        except (OSError, ValueError):
            continue
    return None


async def test_it_stays_frozen_and_goes_on_where_that_is_accepted(
    rig: Rig, client: DataClient, dialler: LocalDialler, tmp_path: Path
) -> None:
    word, ticks = "sleep 98765.25", tmp_path / "ticks"
    gone = await client.spawn(f"exec {word}")
    kept = await client.spawn(f"while :; do echo >> {ticks}; sleep 0.005; done")
    await until(lambda: ticks.exists() and find(word))
    told = (await rig.suspend(FREEZE)).json()
    assert "sleep" in {one["name"] for one in told["programs"]}
    assert len(told["programs"]) == told["processes"]
    os.kill(find(word), signal.SIGKILL)
    await until(lambda: find(word) is None)
    dialler.thaw(FREEZE, incarnation=1)
    size = ticks.stat().st_size
    for _ in range(2):
        refused = await rig.attach()
        assert error_code(refused) == "restore_incomplete"
        missing = refused.json()["error"]["details"]["missing"]
        assert missing[1:] == [f"command {gone}"]
        assert missing[0].endswith("(sleep)")
        assert (await rig.activity())["suspended"]
    assert ticks.stat().st_size == size
    answer = await rig.control.post(
        f"/v1/sandboxes/{SANDBOX}/attach",
        json={"generation": 1, "hostname": "box", "wait_s": 5, "incomplete": True},
    )
    assert (answer.status_code, answer.json()["missing"]) == (200, missing)
    assert (await rig.attach()).json()["missing"] == missing
    await until(lambda: ticks.stat().st_size > size)
    assert (await client.call("GET", f"/commands/{kept}")).json()["status"] == "running"

    await until(lambda: rig.gateway.sandboxes.get(SANDBOX).store.get(gone).ended)
    assert (await client.call("GET", f"/commands/{gone}")).json()["signal"] == signal.SIGKILL


async def test_a_whole_one_goes_on(rig: Rig, client: DataClient, dialler: LocalDialler) -> None:
    await client.spawn("exec sleep 98766.25")
    for incarnation in (1, 2):
        freeze = f"{incarnation:032x}"
        assert (await rig.suspend(freeze)).status_code == 200
        dialler.thaw(freeze, incarnation=incarnation)
        answer = await rig.attach()
        assert (answer.status_code, answer.json()["missing"]) == (200, [])


def test_what_a_program_calls_itself_is_no_escape_sequence() -> None:
    named = "process 12 (\x1b]0;owned\x07\nroot)"
    body = {"code": "restore_incomplete", "message": "not all", "missing": [named]}
    error = refusal(json.dumps(body).encode(), what="cannot go on")
    assert error.details["missing"] == ["process 12 (\ufffd]0;owned\ufffd\ufffdroot)"]
    hello = {"contract": 1, "agent": "x", "sandbox": "s", "generation": 1, "thawed": {"missing": [named]}}
    assert read_answer(Hello, json.dumps(hello).encode()).thawed.missing == error.details["missing"]
    with pytest.raises(AgentFailure):
        read_answer(Hello, json.dumps(hello | {"thawed": {"missing": ["x"] * 101}}).encode())
