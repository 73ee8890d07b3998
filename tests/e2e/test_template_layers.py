"""What is not done again by a build, and what a build that does not come to its end leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_templates import SMALL, images

from cpuos import AsyncClient, AsyncTemplate, Client, CpuosError, Sandbox, Template
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import until, wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(400)]
NOW = "date +%s%N"
# A whole build on a machine that has much else to do.
SLOW_S = 150.0
SIZE = {"memory": "512MiB", "disk": "1GiB", "cpu": 1}


@pytest.fixture(autouse=True)
def _nothing_is_left(instance: Instance, client: Client) -> Iterator[None]:
    yield
    for template in Template.list(client=client):
        if template.built:
            Template.delete(template.name, client=client)
    assert images(instance) == []
    wait_until(lambda: Sandbox.list(client=client) == [], within_s=SLOW_S)


def looked(client: Client, *, run: list[str], **recipe: Any) -> tuple[list[str], list[str]]:
    """Steps that were not done again, and what /opt has after all. The build fails then, which is quicker."""
    told: list[str] = []
    last = "head /opt/[a-z]*; false"
    with pytest.raises(CpuosError) as failed:
        Template.build("looked", run=[*run, last], on_output=told.append, client=client, **{**SIZE, **recipe})
    assert failed.value.details["step"] == f"run {len(run) + 1}", failed.value
    done = [line.split(":")[0].removeprefix("== ") for line in told if line.endswith("(done before)")]
    return done, told[told.index(f"== run {len(run) + 1}: {last}") + 1 :]


def test_a_changed_step_begins_where_it_comes(client):
    recipe: dict[str, Any] = {"files": {"/opt/a-file": "1\n"}, "env": {"WHO": "me"}}
    run = [f"{NOW} > /opt/b; echo $WHO > /tmp/between", f"{NOW} > /opt/c", "cp /tmp/between /opt/d"]
    done, first = looked(client, **recipe, run=run)
    assert not done
    assert first[-1] == "me", "what a step leaves in /tmp is there for the next"

    done, again = looked(client, **recipe, run=run)
    assert done == ["files", "run 1", "run 2", "run 3"]
    assert again == first, "nothing was run again"

    done, second = looked(client, **recipe, run=[*run[:2], "cp /tmp/between /opt/e"])
    assert done == ["files", "run 1", "run 2"]
    assert second[-2:] == ["==> /opt/e <==", "me"], "what it found in /tmp came back too"
    assert second[:-2] == first[:-2]

    for other in ({"files": {"/opt/a-file": "2\n"}}, {"env": {"WHO": "you"}}, {"memory": "1GiB"}, {"fresh": True}):
        done, third = looked(client, **{**recipe, **other}, run=run)
        assert not done, other
        assert third != first


def test_a_whole_build_takes_up_what_one_that_failed_has_done(client):
    run = [f"{NOW} > /opt/b; setcap cap_net_raw+ep /usr/bin/rg; mknod /opt/device c 1 3"]
    _, first = looked(client, run=run)
    told: list[str] = []
    built = Template.build("mended", run=[*run, "true"], on_output=told.append, client=client, **SIZE)
    assert [line.split(":")[0] for line in told if line.endswith("(done before)")] == ["== run 1"]
    assert [line.split(":")[0] for line in told if line.startswith("== ")][1:] == [
        f"== {step}" for step in ("run 2", "pack", "store", "try")
    ]
    dropped = {(entry.path, entry.what) for entry in built.dropped}
    assert dropped == {("/opt/device", "device"), ("/usr/bin/rg", "security.capability")}, "whichever build did it"
    with Sandbox.create("mended", client=client, **SMALL) as sandbox:
        assert sandbox.exec("cat /opt/b; id -u").stdout.split()[0] == first[1]


def test_the_policy_of_the_network_is_part_of_what_a_step_saw(client):
    recipe: dict[str, Any] = {"files": {"/opt/a-file": "1\n"}, "run": [f"{NOW} > /opt/b"]}
    _, first = looked(client, **recipe)
    client.network.update("off")
    try:
        done, second = looked(client, **recipe)
    finally:
        client.network.update("internet")
    assert done == ["files"]
    assert second != first


@pytest.mark.slow
def test_layers_go_with_their_parent(instance, client):
    folder = instance.settings.node_state_dir / "snapshots"

    def kept() -> set[str]:
        return {entry.name for entry in folder.glob("[!.]*")}

    Template.build("parent", run=["echo 1 > /opt/parent"], client=client, **SIZE)
    before = kept()
    looked(client, from_="parent", run=["echo 1 > /opt/child"])
    assert len(kept() - before) == 1
    Template.delete("parent", client=client)
    wait_until(lambda: kept() == before, within_s=SLOW_S)


async def test_equal_builds_at_once_are_one(instance, async_client: AsyncClient):
    recipe = {"files": {"/opt/a-file": "1\n"}, "run": ["sleep 1; date +%s%N > /opt/when"]}
    names = [f"twin-{number}" for number in range(4)]
    builds = [AsyncTemplate.build(name, **recipe, **SIZE, client=async_client) for name in names]
    made = await asyncio.gather(*builds)
    assert len({template.digest for template in made}) == 1
    assert [template.name for template in made] == names
    assert len(images(instance)) == 1
    failing = {"run": ["sleep 1; echo why; false"], **SIZE}
    failed = await asyncio.gather(
        *(AsyncTemplate.build(name, **failing, client=async_client) for name in names[:3]), return_exceptions=True
    )
    for error in failed:
        assert isinstance(error, CpuosError)
        assert (error.code, error.details["step"]) == ("build_failed", "run 1")
        assert "why" in error.why
    assert len({str(error) for error in failed}) == 3, "two say which build they waited for"


def running(client: Client, name: str, step: str, **recipe: Any) -> dict[str, Any]:
    """A build that is in this step."""
    body = json.dumps({"name": name, "fresh": True, **recipe}).encode()
    made = json.loads(client.call("POST", "/v1/builds", content=body, repeatable=False).body)["build"]

    def there() -> dict[str, Any] | None:
        now = client.get_json(f"/v1/builds/{made['id']}")
        if step == "upload":
            return now if now["state"] == "uploading" else None
        if any(one["name"] == step and one["state"] != "pending" for one in now["steps"]):
            return now
        assert now["state"] != "failed", now
        return None

    found: dict[str, Any] | None = wait_until(there, within_s=SLOW_S)
    assert found is not None
    return found


async def test_who_waits_for_a_build_that_is_cancelled_goes_on_alone(client, async_client: AsyncClient):
    """With the files that it has: they go into the sandbox that it gets then."""
    file = {"path": "/opt/a-file", "sha256": hashlib.sha256(b"here\n").hexdigest(), "size": 5}
    first = running(client, "first", "upload", files=[file], run=["cat /opt/a-file; false"], disk_mib=1024)

    def asked() -> int:
        entries = client.get_json("/v1/audit?action=template.build&limit=1000")["entries"]
        return len([one for one in entries if one["result"] == "ok"])

    before = asked()
    lines: list[str] = []
    recipe = {"files": {"/opt/a-file": "here\n"}, "run": ["cat /opt/a-file; false"], "on_output": lines.append}
    second = asyncio.create_task(AsyncTemplate.build("second", **recipe, **SIZE, client=async_client))
    await until(lambda: asked() > before)
    client.call("DELETE", f"/v1/builds/{first['id']}")
    with pytest.raises(CpuosError) as failed:  # in a step of its own, which is quicker than a whole build
        await second
    assert (failed.value.details["step"], failed.value.details["exit_code"]) == ("run 1", 1)
    assert lines == ["== files: 1 files, 0 variables", "== run 1: cat /opt/a-file; false", "here"]


FILE = {"path": "/opt/a", "sha256": "0" * 64, "size": 1}
STEPS = ["upload", "run 1", "run 2", "pack", "store", "try"]


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("kill", "run 1"),
        ("cancel", "try"),
        *(pytest.param("kill", step, marks=pytest.mark.slow) for step in ("upload", "pack", "store", "try")),
        *(pytest.param("cancel", step, marks=pytest.mark.slow) for step in ("upload", "run 2")),
    ],
)
def test_a_build_that_is_ended_in_a_step_leaves_nothing(instance, client, step, how):
    """Whoever ends it: the caller, or what kills its sandbox."""
    recipe: dict[str, Any] = {"run": ["sleep 0.5", "sleep 0.5"], "start": "sleep 1 & wait", "disk_mib": 1024}
    if step == "upload":
        recipe["files"] = [FILE]
    build = running(client, "doomed", step, **recipe)
    if how == "cancel":
        client.call("DELETE", f"/v1/builds/{build['id']}")
    else:
        for sandbox in Sandbox.list(client=client):
            with contextlib.suppress(CpuosError):
                Sandbox.connect(sandbox.id, client=client).kill()
        if step == "upload":
            client.call("PATCH", f"/v1/builds/{build['id']}", content=b'{"uploaded": true}')

    def ended() -> dict[str, Any] | None:
        now = client.get_json(f"/v1/builds/{build['id']}")
        return now if now["state"] in ("ready", "failed") else None

    end = wait_until(ended, within_s=SLOW_S)
    assert end is not None
    if end["state"] == "failed":
        assert end["error"]["details"]["step"] in [*STEPS, "files"]
        with pytest.raises(CpuosError) as unknown:
            Template.get("doomed", client=client)
        assert unknown.value.code == "template_not_found"
        wait_until(lambda: images(instance) == [], within_s=SLOW_S)
    else:  # its last moment had passed
        assert step in ("store", "try")
    wait_until(lambda: Sandbox.list(client=client) == [], within_s=SLOW_S)
