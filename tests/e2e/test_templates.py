"""Templates that a workspace builds, on real sandboxes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuos import AsyncClient, AsyncTemplate, Client, CpuosError, Sandbox, Template
from cpuos.testing.instance import Instance

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(180)]
SMALL = {"memory": "256MiB", "disk": "256MiB", "cpu": 1}
SERVER = """\
use IO::Socket::INET;
my $server = IO::Socket::INET->new(Listen => 5, LocalAddr => "127.0.0.1:8000") or die;
while (my $visitor = $server->accept) { print $visitor "served\\n"; close $visitor }
"""


@pytest.fixture(autouse=True)
def _nothing_is_left(instance: Instance, client: Client) -> Iterator[None]:
    yield
    for template in Template.list(client=client):
        if template.built:
            Template.delete(template.name, client=client)
    assert images(instance) == []
    assert Sandbox.list(client=client) == []


def images(instance: Instance) -> list[str]:
    folder = instance.settings.node_state_dir / "templates"
    # What begins with a dot is on its way out.
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_a_template_of_files_and_commands(instance, client, tmp_path):
    app = tmp_path / "app"
    (app / "inner").mkdir(parents=True)
    (app / "server.pl").write_text(SERVER)
    (app / "inner" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (app / "inner" / "run.sh").chmod(0o755)
    told: list[str] = []
    recipe = {
        "files": {"/opt/app": app, "/etc/motd": "hello\n"},
        "run": ["echo building; useradd --system worker", "/opt/app/inner/run.sh > /opt/ran; mkfifo /opt/pipe"],
        "env": {"GREETING": "hello there"},
        "start": "perl /opt/app/server.pl",
        "ready": "port:8000",
    }
    built = Template.build("mine", **recipe, on_output=told.append, client=client)
    assert "building" in told
    assert [line.split(":")[0] for line in told if line.startswith("== ")] == [
        f"== {name}" for name in ("files", "run 1", "run 2", "pack", "store", "try")
    ]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", built.digest)
    installed = {template.name: template for template in Template.list(client=client)}
    assert (built.parent, built.parent_digest) == ("base", installed["base"].digest)
    assert installed["mine"].built
    assert installed["mine"].digest == built.digest

    with Sandbox.create("mine", client=client, **SMALL) as sandbox:
        assert sandbox.info.template_digest == built.digest
        shown = sandbox.exec("cat /etc/motd /opt/ran; echo $GREETING; id -u worker > /dev/null; test -p /opt/pipe")
        assert (shown.stdout, shown.exit_code) == ("hello\nran\nhello there\n", 0)
        assert sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/8000; cat <&3").stdout == "served\n"
        assert sandbox.exec("sudo -n id -u; touch ~/there /workspace/here").stdout == "0\n"
        with pytest.raises(CpuosError) as refused:
            Template.delete("mine", client=client)
        assert refused.value.code == "template_in_use"
        assert sandbox.id in str(refused.value)

    told.clear()
    again = Template.build("other", **recipe, on_output=told.append, client=client)
    assert again.digest == built.digest
    assert not [line for line in told if line.startswith("== ")], "no step was run again"
    assert len(images(instance)) == 1
    Template.delete("mine", client=client)
    with Sandbox.create("other", client=client, **SMALL) as sandbox:
        sandbox.exec("echo kept > ~/kept", check=True)
        sandbox.pause()
        sandbox.resume()
        assert sandbox.exec("cat /etc/motd").stdout == "hello\n"
        snapshot = sandbox.snapshot()
    # Made of a built one, and under a name that meant another: sandboxes get the newest.
    Template.build("other", from_="other", run=["echo changed > /etc/motd"], client=client)
    with Sandbox.create("other", client=client, **SMALL) as sandbox:
        assert sandbox.exec("cat /etc/motd /opt/ran; echo $GREETING").stdout == "changed\nran\nhello there\n"
    # What was saved goes on from the image that it was begun with.
    with snapshot.fork(1)[0] as sandbox:
        assert sandbox.info.template_digest == built.digest
        assert sandbox.exec("cat /etc/motd ~/kept").stdout == "hello\nkept\n"
    snapshot.delete()


def test_a_failed_build_says_which_step_and_leaves_nothing(instance, client):
    with pytest.raises(CpuosError) as failed:
        Template.build("bad", run=["true", "echo about to fail; echo 'it \x1b[31mfails' >&2; exit 7"], client=client)
    error = failed.value
    assert (error.code, error.details["step"]) == ("build_failed", "run 2")
    assert "exit code 7" in error.why
    assert "about to fail" in error.why
    assert "fails" in error.why
    assert "\x1b" not in str(error)
    logs, sandbox, command = error.hint.removeprefix("cpuos ").split()
    assert logs == "logs"
    assert Sandbox.connect(sandbox, client=client).commands.get(command).output() == b"about to fail\n"
    with pytest.raises(CpuosError) as unknown:
        Sandbox.create("bad", client=client)
    assert unknown.value.code == "template_not_found"
    assert "built-" not in str(unknown.value)


def test_what_a_hostile_build_tries(instance, client):
    """Nothing of it is a danger to the host, which never reads the tree; what is lost on the way is told."""
    commands = [
        "mknod /opt/memory c 1 1; mknod /opt/disk b 8 0; perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0);"
        ' bind(S, pack_sockaddr_un("/opt/socket"))\'',
        "cp /bin/id /opt/rooted; chmod 4755 /opt/rooted; cp /bin/id /opt/capable; setcap cap_net_raw+ep /opt/capable",
        "touch $'/opt/two\\nlines' $'/opt/\\377\\376' \"/opt/quo'te\"",
        "ln -s /etc/shadow /opt/shadow; ln -s ../../../../../../../etc/passwd /opt/up; ln -s /opt/loop /opt/loop",
        "ln -s /proc/1/root /opt/host; mkdir /opt/deep; ln /etc/hosts /opt/deep/hard",
        "rm -rf /workspace/.cpuos-build/root.erofs; ln -s /etc/passwd /workspace/.cpuos-build/dropped",
        "(while :; do touch /opt/moving; rm -f /opt/moving; done) > /dev/null 2>&1 &",
    ]
    built = Template.build("hostile", run=commands, client=client)
    dropped = {(entry.path, entry.what) for entry in built.dropped}
    assert {("/opt/memory", "device"), ("/opt/disk", "device"), ("/opt/capable", "security.capability")} <= dropped
    with Sandbox.create("hostile", client=client, **SMALL) as sandbox:
        shown = sandbox.exec("/opt/rooted -u; /opt/capable -u; ls /opt/memory /opt/disk /opt/socket 2>/dev/null")
        assert shown.stdout == "0\n0\n"
        assert sandbox.exec("cat /opt/shadow").exit_code == 1  # a link within the image
        assert sandbox.exec("find /opt -name 'two*' | wc -l; ls /opt/loop; readlink /opt/up").stdout.startswith("2\n")


@pytest.mark.slow
def test_a_build_file_on_the_command_line(instance, client, tmp_path):
    (tmp_path / "page").write_text("from a file\n")
    (tmp_path / "template.toml").write_text(
        """
name = "filed"
run = ["echo told"]
[files]
"/opt/page" = "page"
"""
    )

    def cpuos(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cpuos.cli", "template", *words]
        return subprocess.run(argv, env=instance.environment(), capture_output=True, text=True)

    built = cpuos("build", str(tmp_path / "template.toml"))
    assert (built.stdout, built.returncode) == ("filed\n", 0), built.stderr
    assert "== run 1: echo told\ntold\n== pack" in built.stderr
    assert "filed" in cpuos("ls").stdout
    shown = json.loads(cpuos("inspect", "filed", "--json").stdout)
    assert shown["steps"] == ["files: 1 files, 0 variables", "run 1: echo told"]
    assert "/opt/page sha256:" in cpuos("inspect", "filed").stdout
    again = cpuos("build", "--name", "copied", "--copy", f"{tmp_path / 'page'}:/opt/page", "--run", "echo told")
    assert (again.stdout, again.returncode) == ("copied\n", 0), again.stderr
    assert len(images(instance)) == 1
    failed = cpuos("build", "--name", "bad", "--run", "echo oops >&2; false")
    assert failed.returncode == 1
    assert "oops\ncannot build template 'bad': step 'run 1' failed" in failed.stderr
    assert cpuos("rm", "filed").stdout == "filed\n"
    assert cpuos("rm", "filed").returncode == 1


@pytest.mark.parametrize(
    ("end", "why"), [("kill", "the server was restarted"), ("restart", "by the server, which stops, in step 'run 1'")]
)
def test_a_server_that_ends_ends_its_builds(instance, client, end, why):
    body = json.dumps({"name": "orphan", "run": ["sleep 100"]}).encode()
    build = json.loads(client.call("POST", "/v1/builds", content=body, repeatable=False).body)["build"]
    while build["steps"][0]["state"] == "pending":
        time.sleep(0.02)
        build = client.get_json(f"/v1/builds/{build['id']}")
    getattr(instance, end)("server")
    instance.wait_ready()
    deadline = time.monotonic() + 30
    while build["state"] != "failed" and time.monotonic() < deadline:
        time.sleep(0.1)
        build = client.get_json(f"/v1/builds/{build['id']}")
    assert (build["state"], build["error"]["why"]) == ("failed", why)
    while Sandbox.list(client=client) and time.monotonic() < deadline:
        time.sleep(0.1)


def test_an_image_over_the_limit_is_refused(client):
    with pytest.raises(CpuosError) as refused:
        Template.build("huge", run=["truncate -s 10G /opt/huge"], client=client)
    assert (refused.value.code, refused.value.details["limit"]) == ("limit_reached", "template_size")


def test_a_build_has_its_time(client):
    with pytest.raises(CpuosError) as refused:
        Template.build("slow", run=["sleep 60"], timeout="3s", client=client)
    assert (refused.value.code, refused.value.details["limit"]) == ("limit_reached", "build_time")
    assert refused.value.details["step"] == "run 1"


async def test_an_interrupted_build_is_cancelled(async_client: AsyncClient):
    started = asyncio.Event()
    task = asyncio.create_task(
        AsyncTemplate.build(
            "never", run=["echo begun; sleep 60"], on_output=lambda line: started.set(), client=async_client
        )
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    entries = (await async_client.audit(action="build.cancel", limit=1000)).entries
    assert [entry.result for entry in entries][-1] == "ok"


@pytest.mark.slow
async def test_two_builds_of_one_name_at_once_do_not_collide(instance, async_client: AsyncClient):
    first, second = await asyncio.gather(
        AsyncTemplate.build("twin", run=["echo 1 > /opt/which"], client=async_client),
        AsyncTemplate.build("twin", run=["echo 2 > /opt/which"], client=async_client),
    )
    now = await AsyncTemplate.get("twin", client=async_client)
    assert now.digest in (first.digest, second.digest)
    assert len(images(instance)) == 1  # the other has no name any more


def test_what_start_runs_must_become_ready(client, monkeypatch):
    with pytest.raises(CpuosError) as failed:
        Template.build("dead", start="echo no server here; exit 1", ready="port:8000", client=client)
    assert failed.value.code == "start_not_ready"
    assert "no server here" in failed.value.why


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ({"files": {"/workspace/a": "x"}}, "/workspace is not part of an image"),
        ({"files": {"/opt/../etc/a": "x"}}, "without . and .."),
        ({"files": {"opt": "x"}}, "whole path"),
        ({"apt": ["--allow-unauthenticated"]}, "apt"),
        ({"pip": ["-rhttp://example.com/list"]}, "pip"),
        ({"env": {"A": "two\nlines"}}, "one line"),
        ({"ready": "port:80"}, "start"),
        ({"start": "x", "ready": "http://x"}, "port:"),
        ({"from_": "built-aaaaaaaaaaaaaaaaaaaa"}, "cannot find template"),
        ({"from_": "none-such"}, "cannot find template"),
        ({"files": {"/opt/x": Path("/none/such")}}, "no such file"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(client, recipe, word):
    with pytest.raises(CpuosError) as refused:
        Template.build("wrong", client=client, **recipe)
    assert word in str(refused.value)
    assert refused.value.status in (404, 422)


def test_a_name_of_the_installation_is_taken(client):
    with pytest.raises(CpuosError) as refused:
        Template.build("base", run=["true"], client=client)
    assert refused.value.code == "name_taken"
    with pytest.raises(CpuosError) as refused:
        Template.delete("python", client=client)
    assert "installation" in str(refused.value)


def test_a_file_that_is_not_what_was_announced_fails_the_build(client):
    body = {"name": "swapped", "files": [{"path": "/opt/a", "sha256": "0" * 64, "size": 1}]}
    answer = json.loads(client.call("POST", "/v1/builds", content=json.dumps(body).encode(), repeatable=False).body)
    build = answer["build"]
    assert build["state"] == "uploading"
    Sandbox.connect(build["sandbox"], client=client).files.write("/opt/a", "x", user="root")
    client.call("PATCH", f"/v1/builds/{build['id']}", content=b'{"uploaded": true}')
    while build["state"] != "failed":
        time.sleep(0.05)
        build = client.get_json(f"/v1/builds/{build['id']}")
    assert build["error"]["details"]["step"] == "files"
    assert "/opt/a: FAILED" in build["error"]["why"]


def test_nothing_is_built_where_nothing_is_isolated(fake_instance):
    with pytest.raises(CpuosError) as refused:
        Template.build("never", run=["true"], client=fake_instance.client())
    assert refused.value.code == "runtime_unavailable"
