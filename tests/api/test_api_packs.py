"""Data packs over the API, on a fake node: what is asked of a sandbox that runs."""

from __future__ import annotations

from typing import Any

from control_plane import Server, error_of
from cpuos.server.db import packs as records

PACK, OTHER = f"pack-{'a' * 20}", f"pack-{'b' * 20}"


async def add_pack(server: Server, name: str, *, image: str) -> None:
    """As a sandbox that packs leaves it."""
    values: dict[str, Any] = {"workspace": "default", "name": name, "image": image, "node": "node-1"}
    values |= {"digest": f"sha256:{image}", "size_bytes": 1, "files": 1, "created_by": "me"}
    async with server.plane.database.write() as connection:
        await records.put_pack(connection, {**values, "created_at": server.plane.clock()})


async def test_none_is_attached_to_a_sandbox_that_runs(server: Server) -> None:
    await add_pack(server, "weather", image=PACK)
    sandbox = (await server.created(labels={"a": "b"}))["id"]
    change = {"packs": {"/data/weather": "weather"}, "labels": {"a": "c"}}
    refused = await server.http.patch(f"/v1/sandboxes/{sandbox}", json=change)
    told = error_of(refused)
    assert (refused.status_code, told["code"]) == (409, "packs_fixed")
    assert told["what"] == f"cannot attach data pack 'weather' to sandbox {sandbox} at /data/weather"
    assert "gvisor" in told["why"]
    assert "cpuos create --pack /data/weather=weather" in told["try"]
    shown = await server.get(sandbox)
    assert (shown["packs"], shown["labels"]) == ({}, {"a": "b"}), "nothing of the call was done"


async def test_what_it_was_made_with_may_be_asked_for_again(server: Server) -> None:
    await add_pack(server, "weather", image=PACK)
    packs = {"/data/weather": "weather"}
    sandbox = (await server.created(packs=packs))["id"]
    kept = await server.http.patch(f"/v1/sandboxes/{sandbox}", json={"packs": packs})
    assert (kept.status_code, kept.json()["packs"]["/data/weather"]["image"]) == (200, PACK)
    for other in ({"/data/elsewhere": "weather"}, {**packs, "/data/two": "weather"}):
        refused = await server.http.patch(f"/v1/sandboxes/{sandbox}", json={"packs": other})
        assert error_of(refused)["code"] == "packs_fixed"
    await add_pack(server, "weather", image=OTHER)  # the name means another one now
    refused = await server.http.patch(f"/v1/sandboxes/{sandbox}", json={"packs": packs})
    assert error_of(refused)["code"] == "packs_fixed"


async def test_what_cannot_be_right_is_said_first(server: Server) -> None:
    sandbox = (await server.created())["id"]
    for packs, code in (
        ({"/data/none": "none-such"}, "pack_not_found"),
        ({"/workspace/data": "weather"}, "invalid_request"),
        ({"data": "weather"}, "invalid_request"),
    ):
        refused = await server.http.patch(f"/v1/sandboxes/{sandbox}", json={"packs": packs})
        assert error_of(refused)["code"] == code, packs
