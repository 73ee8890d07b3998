"""Templates and builds over the API, on a fake node: whose they are, what is recorded, what goes when."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from sqlalchemy import insert

from control_plane import Server, error_of, until
from cpuos.errors import LimitReached
from cpuos.server.auth import create_key
from cpuos.server.db import templates as records
from cpuos.server.db.models import Workspace
from cpuos.server.templates.room import MAX_BUILDS, TemplateRoom
from cpuos.types.template import TemplateInfo

IMAGE = "built-aaaaaaaaaaaaaaaaaaaa"


async def add_template(
    server: Server, *, name: str = "mine", image: str = IMAGE, key: str = "k", size: int = 5
) -> None:
    """As a build leaves it."""
    server.installation.node.built[image] = b"image"
    template = TemplateInfo(name=name, digest="sha256:b", size_bytes=size, parent="base", key=key)
    async with server.plane.database.write() as connection:
        await records.put_template(connection, workspace="default", image=image, template=template)
    await server.plane.refresh_nodes()


async def other_workspace(server: Server) -> dict[str, str]:
    clock = server.installation.clock
    async with server.plane.database.write() as connection:
        await connection.execute(insert(Workspace).values(id="other", name="other", created_at=clock()))
        key = await create_key(connection, workspace="other", name="k", clock=clock)
    return {"authorization": f"Bearer {key}"}


def names(answer: httpx2.Response) -> list[str]:
    return [template["name"] for template in answer.json()["templates"]]


async def test_a_name_means_an_image_to_its_workspace_alone(server: Server) -> None:
    await add_template(server)
    other = await other_workspace(server)
    assert names(await server.http.get("/v1/templates")) == ["base", "mine", "python"]
    assert names(await server.http.get("/v1/templates", headers=other)) == ["base", "python"]
    sandbox = await server.created(template="mine")
    assert sandbox["template"] == "mine"
    assert server.installation.node.sandboxes[sandbox["id"]].template == IMAGE
    for name in ("mine", IMAGE):
        refused = await server.http.post("/v1/sandboxes", json={"template": name}, headers=other)
        assert (refused.status_code, error_of(refused)["code"]) == (404, "template_not_found")
        assert IMAGE not in str(error_of(refused)["why"])
    for method in ("GET", "DELETE"):
        refused = await server.http.request(method, "/v1/templates/mine", headers=other)
        assert (refused.status_code, error_of(refused)["code"]) == (404, "template_not_found")
    refused = await server.create(template=IMAGE)  # not even by its own workspace
    assert error_of(refused)["code"] == "template_not_found"
    nodes = (await server.http.get("/v1/nodes")).json()["nodes"]
    assert IMAGE not in str(nodes)


async def test_an_image_goes_with_its_last_name_and_sandbox(server: Server) -> None:
    node = server.installation.node
    await add_template(server)
    await add_template(server, name="alias")
    sandbox = await server.created(template="mine")
    refused = await server.http.delete("/v1/templates/mine")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "template_in_use")
    assert error_of(refused)["details"]["sandboxes"] == [sandbox["id"]]
    await server.kill(sandbox["id"])
    assert (await server.http.delete("/v1/templates/mine")).status_code == 200
    assert IMAGE in node.built  # `alias` means it too
    assert (await server.http.delete("/v1/templates/alias")).status_code == 200
    assert IMAGE not in node.built
    assert (await server.http.get("/v1/templates/alias")).status_code == 404


async def test_an_image_that_a_name_has_left_stays_for_its_sandboxes(server: Server) -> None:
    node = server.installation.node
    await add_template(server)
    sandbox = await server.created(template="mine")
    newer = "built-bbbbbbbbbbbbbbbbbbbb"
    await add_template(server, image=newer)
    await server.plane.builder.tidy()
    assert set(node.built) == {IMAGE, newer}
    await server.kill(sandbox["id"])
    await server.plane.builder.tidy()
    assert set(node.built) == {newer}


async def test_a_workspace_has_its_share_of_the_disk(server: Server) -> None:
    room = TemplateRoom(server.plane.database, workspace_mib=1)
    await add_template(server, size=1 << 19)
    await add_template(server, name="alias", size=1 << 19)  # the same image, which is there once
    await room.check_size("default", "next", size=1 << 19)
    with pytest.raises(LimitReached) as refused:
        await room.check_size("default", "next", size=(1 << 19) + 1)
    assert refused.value.details["limit"] == "templates_size"
    await add_template(server, name="other", image="built-bbbbbbbbbbbbbbbbbbbb", size=1 << 19)
    await room.check_size("default", "other", size=1 << 19)  # in the place of what the name means now
    await room.check_size("another", "next", size=1 << 20)
    with pytest.raises(LimitReached) as refused:
        await room.check_counts("default", "next", builds=MAX_BUILDS)
    assert refused.value.details["limit"] == "builds"


async def test_installed_templates_are_shown_and_stay(server: Server) -> None:
    shown = (await server.http.get("/v1/templates/base")).json()
    assert (shown["built"], shown["digest"]) == (False, "sha256:base")
    refused = await server.http.delete("/v1/templates/base")
    assert refused.status_code == 409
    refused = await server.http.post("/v1/builds", json={"name": "base"})
    assert (refused.status_code, error_of(refused)["code"]) == (409, "name_taken")


async def test_the_same_again_is_there_at_once(server: Server) -> None:
    from cpuos.server.templates.recipe import build_key
    from cpuos.types.template import TemplateBuild

    recipe: dict[str, Any] = {"run": ["true"], "env": {"A": "b"}}
    request = TemplateBuild(name="x", **recipe)
    policy = await server.plane.networks.workspace_policy("default")
    inputs = {"workspace": "default", "parent_digest": "sha256:base", "network": policy.model_dump_json()}
    await add_template(server, key=build_key(request, **inputs))
    answer = await server.http.post("/v1/builds", json={"name": "again", "cpu": 1, **recipe})
    body = answer.json()
    assert (answer.status_code, body["build"]["state"], body["build"]["reused"]) == (201, "ready", True)
    assert (body["access"], body["build"]["sandbox"]) == (None, None)
    assert (await server.http.get("/v1/templates/again")).json()["digest"] == "sha256:b"
    for changed in ({"run": ["false"]}, {"env": {"A": "c"}}, {"from": "python"}, {"fresh": True}):
        answer = await server.http.post("/v1/builds", json={"name": "again", **recipe, **changed})
        assert answer.json()["build"]["reused"] is False, changed
    # Another workspace's recipe may be equal: it does not start from what this one has made.
    answer = await server.http.post(
        "/v1/builds", json={"name": "again", **recipe}, headers=await other_workspace(server)
    )
    assert answer.json()["build"]["reused"] is False


async def test_a_build_belongs_to_its_workspace_and_is_audited(server: Server) -> None:
    begun = await server.http.post("/v1/builds", json={"name": "mine", "run": ["true"]})
    assert begun.status_code == 201
    build = begun.json()["build"]
    other = await other_workspace(server)
    for which, headers in ((build["id"], other), ("none-such", {})):
        for method, body in (("GET", None), ("PATCH", {"uploaded": True}), ("DELETE", None)):
            refused = await server.http.request(method, f"/v1/builds/{which}", json=body, headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (404, "build_not_found")

    async def ended() -> bool:
        return (await server.http.get(f"/v1/builds/{build['id']}")).json()["state"] == "failed"

    # There is no gateway to build through: it fails, and leaves nothing.
    await until(ended)
    assert (await server.get(build["sandbox"]))["state"] == "stopped"
    assert (await server.http.patch(f"/v1/builds/{build['id']}", json={"uploaded": True})).json()["state"] == "failed"
    assert (await server.http.delete(f"/v1/builds/{build['id']}")).json()["state"] == "failed"
    entries = (await server.http.get("/v1/audit", params={"limit": 1000})).json()["entries"]
    for action in ("template.build", "build.update", "build.cancel"):
        told = [(entry["phase"], entry["result"]) for entry in entries if entry["action"] == action]
        assert ("intent", None) in told
        assert ("outcome", "ok") in told
    outcome = next(entry for entry in entries if entry["action"] == "template.build" and entry["result"] == "ok")
    assert outcome["detail"]["build"] == build["id"]
    assert outcome["sandbox"] == build["sandbox"]


@pytest.mark.parametrize(
    "field",
    [
        {"files": [{"path": "/proc/x", "sha256": "0" * 64, "size": 1}]},
        {"files": [{"path": "/a\nb", "sha256": "0" * 64, "size": 1}]},
        {"files": [{"path": "/a//b", "sha256": "0" * 64, "size": 1}]},
        {"files": [{"path": "/a", "sha256": "0" * 64, "size": 1}] * 2},
        {"files": [{"path": "/a", "sha256": "zz", "size": 1}]},
        {"apt": ["a b"]},
        {"pip": ["-e."]},
        {"env": {"A=B": "c"}},
        {"ready": "port:0", "start": "x"},
        {"run": [""]},
        {"unknown": 1},
    ],
)
async def test_fields_that_are_not_acceptable(server: Server, field: dict[str, Any]) -> None:
    refused = await server.http.post("/v1/builds", json={"name": "mine", **field})
    assert (refused.status_code, error_of(refused)["code"]) == (422, "invalid_request")
    assert server.installation.node.sandboxes == {}
