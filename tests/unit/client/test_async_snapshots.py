"""Pause, resume, snapshots and forks, against a scripted server."""

from __future__ import annotations

import json

import pytest

from cpuos import AsyncClient, AsyncSandbox, AsyncSnapshot
from cpuos.errors import InvalidRequest, NotFound, Unavailable
from unit.client.fake_api import SANDBOX_ID, SNAPSHOT_ID, FakeApi, Fault

SANDBOX = f"/v1/sandboxes/{SANDBOX_ID}"


async def test_pause_and_resume(api: FakeApi) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        await sbx.pause()
        assert sbx.state == "paused"
        await sbx.resume()
        assert sbx.state == "running"
    assert [seen.path for seen in api.seen if seen.method == "POST"][1:] == [f"{SANDBOX}/pause", f"{SANDBOX}/resume"]


async def test_times_and_ends_are_sent_as_the_server_takes_them(api: FakeApi) -> None:
    async with AsyncClient() as client:
        await AsyncSandbox.create(
            idle_timeout="5m", on_idle="kill", on_timeout="pause", auto_resume=False, client=client
        )
        with pytest.raises(InvalidRequest):
            await AsyncSandbox.create(on_idle="sleep", client=client)
    assert json.loads(api.calls("POST", "/v1/sandboxes")[0].body) == {
        "template": "python",
        "idle_timeout_s": 300.0,
        "on_idle": "kill",
        "on_timeout": "pause",
        "auto_resume": False,
    }


async def test_a_snapshot_is_made_found_used_and_deleted(api: FakeApi) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        snapshot = await sbx.snapshot("base", memory=False)
        assert (snapshot.id, snapshot.name, snapshot.state) == (SNAPSHOT_ID, "base", "ready")
        request = api.calls("POST", f"{SANDBOX}/snapshots")[0]
        assert json.loads(request.body) == {"name": "base", "memory": False}
        assert request.headers["idempotency-key"]
        assert (await AsyncSnapshot.get("base", client=client)).id == SNAPSHOT_ID
        assert [one.id for one in await AsyncSnapshot.list(client=client)] == [SNAPSHOT_ID]
        for given in (snapshot, snapshot.id):
            await AsyncSandbox.create(snapshot=given, client=client)
        assert json.loads(api.calls("POST", "/v1/sandboxes")[-1].body) == {"snapshot": SNAPSHOT_ID}
        await snapshot.delete()
        assert snapshot.state == "deleting"
        with pytest.raises(NotFound):
            await AsyncSnapshot.get("nowhere", client=client)


async def test_forks(api: FakeApi) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        assert len(await sbx.fork(3, timeout="1m", labels={"a": "b"})) == 3
        request = api.calls("POST", f"{SANDBOX}/fork")[0]
        assert json.loads(request.body) == {"count": 3, "timeout_s": 60.0, "labels": {"a": "b"}}
        snapshot = await sbx.snapshot()
        (one,) = await snapshot.fork()
        assert (await one.exec("true")).exit_code == 0
        with pytest.raises(InvalidRequest):
            await sbx.fork(0)


async def test_a_fork_whose_answer_was_lost_is_repeated_with_its_key(api: FakeApi, delays: list[float]) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        api.faults = [Fault("POST", f"{SANDBOX}/fork", close=True)]
        await sbx.fork(2)
    keys = [seen.headers["idempotency-key"] for seen in api.calls("POST", f"{SANDBOX}/fork")]
    assert (len(keys), len(set(keys))) == (2, 1)


async def test_a_call_that_waited_in_vain_for_a_resume_is_made_once_more(api: FakeApi, delays: list[float]) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        api.faults = [Fault("POST", f"{SANDBOX}/commands", error="sandbox_paused")]
        assert (await sbx.exec("true")).exit_code == 0
        assert delays == [2.0]
        api.faults = [Fault("POST", f"{SANDBOX}/commands", error="sandbox_paused") for _ in range(3)]
        with pytest.raises(Unavailable) as caught:
            await sbx.exec("true")
        assert (caught.value.code, len(api.faults)) == ("sandbox_paused", 1)


async def test_one_that_calls_do_not_resume_is_not_asked_again(api: FakeApi, delays: list[float]) -> None:
    async with AsyncClient() as client:
        sbx = await AsyncSandbox.create(client=client)
        api.faults = [Fault("POST", f"{SANDBOX}/commands", error="sandbox_paused", details={"auto_resume": False})]
        with pytest.raises(Unavailable):
            await sbx.exec("true")
        assert delays == []


def test_a_snapshot_is_not_made_by_its_class() -> None:
    with pytest.raises(TypeError, match="get"):
        AsyncSnapshot()
