# Generated from tests/unit/client/test_async_instance.py by scripts/gen_sync.py; edit that.
"""The client with real server, gateway and node, on the fake runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpuos import Client, Sandbox
from cpuos.errors import CpuosError, SandboxGone
from cpuos.testing.instance import Instance


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    with Instance(runtime="fake") as made:
        yield made


def test_terminals(instance: Instance) -> None:
    client = Client(instance.api_url, instance.api_key)
    with Sandbox.create(client=client) as sbx:
        with sbx.pty("bash --norc", cols=100, rows=30) as terminal:
            terminal.send("stty size; exit 5\n")
            output = b"".join([piece for piece in terminal])
            assert b"30 100" in output
            result = terminal.wait()
            assert (result.exit_code, result.stdout_raw) == (5, output)
        with pytest.raises(CpuosError) as caught:
            sbx.pty("bash", user="nobody-here")
        assert caught.value.code == "user_not_found"
        with sbx.pty(["sleep", "1000"]) as terminal:
            command = terminal.id
        assert ((sbx.commands.get(command)).wait(timeout=60)).status == "killed"
    client.close()


def test_a_kept_shell(instance: Instance) -> None:
    client = Client(instance.api_url, instance.api_key)
    with Sandbox.create(client=client) as sbx, sbx.shell() as shell:
        shell.run("cd /tmp && export X='a b'")
        result = shell.run('echo "$X" $PWD; exit 3')
        assert (result.stdout, result.exit_code, result.shell_restarted) == ("a b /tmp\n", 3, False)
        lines: list[str] = []
        limit_s = 1
        while not (sbx.exec("test -e begun")).ok:  # a machine that stands still gives it no time to say anything
            lines.clear()
            program = "X=lost; echo begun; touch $OLDPWD/begun; sleep 100"
            result = shell.run(program, timeout=limit_s, on_stdout=lines.append)
            limit_s *= 4
        assert (result.status, result.shell_restarted, lines) == ("timed_out", True, ["begun"])
        assert (shell.run("echo $X")).stdout == "a b\n"
        assert (shell.run("wc -c", stdin="x" * 5)).stdout.strip() == "5"
    client.close()


def test_the_record_of_an_ended_sandbox_is_readable(instance: Instance) -> None:
    client = Client(instance.api_url, instance.api_key)
    made = Sandbox.create(client=client)
    result = made.exec("echo kept")
    made.kill()
    ended = Sandbox.connect(made.id, client=client)
    assert [command.id for command in ended.commands.list()] == [result.command_id]
    job = ended.commands.get(result.command_id)
    assert (job.wait()).stdout == "kept\n"
    with pytest.raises(SandboxGone, match="killed by") as caught:
        ended.exec("true")
    assert caught.value.code == "sandbox_stopped"
    with pytest.raises(SandboxGone, match="killed by"):
        ended.files.read("/etc/hostname")
    client.close()
