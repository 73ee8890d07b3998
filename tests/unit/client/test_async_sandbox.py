"""Creation, records and the end of a sandbox, against a scripted server."""

from __future__ import annotations

import json

import pytest

from cpuos import AsyncClient, AsyncSandbox
from cpuos.errors import InvalidRequest, NotFound, Unavailable
from unit.client.fake_api import SANDBOX_ID, FakeApi, Fault, Program

CREATE = "/v1/sandboxes"


async def test_create_sends_what_was_given_and_no_more(api: FakeApi) -> None:
    sbx = await AsyncSandbox.create(
        "base", timeout="15m", disk="8GiB", memory=512, cpu=1, labels={"team": "data"}, idempotency_key="order-1"
    )
    request = api.calls("POST", CREATE)[0]
    assert json.loads(request.body) == {
        "template": "base",
        "timeout_s": 900.0,
        "disk_mib": 8192,
        "memory_mib": 512,
        "cpu": 1,
        "labels": {"team": "data"},
    }
    assert request.headers["idempotency-key"] == "order-1"
    assert (sbx.id, sbx.name, sbx.state, sbx.isolation) == (SANDBOX_ID, "box", "running", "gvisor")
    await sbx.close()


async def test_the_block_kills_at_its_end_whatever_happens(api: FakeApi) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await AsyncSandbox.create():
            raise ZeroDivisionError
    assert api.killed == [SANDBOX_ID]


async def test_a_failed_clean_up_does_not_hide_the_error_of_the_block(api: FakeApi, delays: list[float]) -> None:
    api.faults = [Fault("DELETE", ".*", close=True) for _ in range(50)]
    with pytest.raises(ZeroDivisionError):
        async with await AsyncSandbox.create():
            raise ZeroDivisionError
    with pytest.raises(Unavailable):
        async with await AsyncSandbox.create():
            pass


async def test_a_create_whose_answer_was_lost_is_repeated_with_its_key(api: FakeApi, delays: list[float]) -> None:
    api.faults = [Fault("POST", CREATE, close=True), Fault("POST", CREATE, error="idempotency_in_progress")]
    sbx = await AsyncSandbox.create()
    keys = [seen.headers["idempotency-key"] for seen in api.calls("POST", CREATE)]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    await sbx.close()


async def test_connect_list_refresh_update(api: FakeApi) -> None:
    client = AsyncClient()
    sbx = await AsyncSandbox.connect("box", client=client)
    assert sbx.id == SANDBOX_ID
    api.program = lambda start: Program([("stdout", b"hi\n")])
    assert (await sbx.exec("echo hi")).stdout == "hi\n", "the ticket is fetched at the first call"
    assert [info.id for info in await AsyncSandbox.list(labels={"a": "b:c", "d": ""}, state="running")] == [SANDBOX_ID]
    assert api.calls("GET", CREATE)[0].raw_query == "state=running&label=a%3Ab%3Ac&label=d%3A"
    await sbx.set_timeout("1h")
    assert json.loads(api.calls("PATCH", ".*")[0].body) == {"timeout_s": 3600.0}
    assert (await sbx.refresh()).cpu == 2
    assert (await client.health())["status"] == "ok"
    with pytest.raises(NotFound):
        await AsyncSandbox.connect("nowhere", client=client)
    await client.close()


async def test_wrong_values_are_told_before_any_call(api: FakeApi) -> None:
    for values in (
        {"name": "Not A Host Name"},
        {"memory": "a lot"},
        {"timeout": "soon"},
        {"cpu": 0},
        {"labels": {"": "x"}},
        {"min_isolation": "steel"},
    ):
        with pytest.raises(InvalidRequest):
            await AsyncSandbox.create(**values)
    assert api.seen == []


async def test_a_cut_answer_is_asked_for_again(api: FakeApi, delays: list[float]) -> None:
    api.faults = [Fault("POST", CREATE, cut_after=30), Fault("GET", f"{CREATE}/.*", cut_after=0)]
    async with await AsyncSandbox.create() as sbx:
        assert (await sbx.refresh()).cpu == 2
    assert len(delays) == 2


async def test_objects_say_what_they_are(api: FakeApi) -> None:
    async with await AsyncSandbox.create() as sbx:
        job = await sbx.spawn("true")
        named = [repr(thing) for thing in (sbx, job, sbx.commands, sbx.files, sbx.shell())]
        assert all(sbx.id in text or job.id in text for text in named), named
        assert "0x" not in "".join(named)


async def test_a_class_called_with_an_id_points_to_connect(api: FakeApi) -> None:
    with pytest.raises(TypeError, match=r"Sandbox\.connect"):
        AsyncSandbox("abcd")


async def test_wrong_values_of_create_are_sentences(api: FakeApi) -> None:
    for values, why in [
        ({"labels": "a=b"}, "a mapping of names to texts"),
        ({"name": "No Name"}, "lower-case letters, digits and inner hyphens"),
        ({"memory": 1}, "memory is 128 MiB to 1 TiB"),
    ]:
        with pytest.raises(InvalidRequest, match=why) as caught:
            await AsyncSandbox.create(**values)
        assert "\ntry: for example " in str(caught.value) or caught.value.hint
    assert not api.calls("POST", "/v1/sandboxes")
    async with await AsyncSandbox.create() as sbx:
        with pytest.raises(InvalidRequest, match="argv is a list of at least one text"):
            await sbx.exec([])
        with pytest.raises(InvalidRequest, match="env is a mapping"):
            await sbx.exec("true", env="A=b")
