"""The client with real server, gateway and node, on the fake runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpuos import AsyncClient, AsyncSandbox
from cpuos.errors import CpuosError, SandboxGone
from cpuos.testing.instance import Instance


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    with Instance(runtime="fake") as made:
        yield made


async def test_terminals(instance: Instance) -> None:
    client = AsyncClient(instance.api_url, instance.api_key)
    async with await AsyncSandbox.create(client=client) as sbx:
        async with await sbx.pty("bash --norc", cols=100, rows=30) as terminal:
            await terminal.send("stty size; exit 5\n")
            output = b"".join([piece async for piece in terminal])
            assert b"30 100" in output
            result = await terminal.wait()
            assert (result.exit_code, result.stdout_raw) == (5, output)
        with pytest.raises(CpuosError) as caught:
            await sbx.pty("bash", user="nobody-here")
        assert caught.value.code == "user_not_found"
        async with await sbx.pty(["sleep", "1000"]) as terminal:
            command = terminal.id
        assert (await (await sbx.commands.get(command)).wait(timeout=60)).status == "killed"
    await client.close()


async def test_a_kept_shell(instance: Instance) -> None:
    client = AsyncClient(instance.api_url, instance.api_key)
    async with await AsyncSandbox.create(client=client) as sbx, sbx.shell() as shell:
        await shell.run("cd /tmp && export X='a b'")
        result = await shell.run('echo "$X" $PWD; exit 3')
        assert (result.stdout, result.exit_code, result.shell_restarted) == ("a b /tmp\n", 3, False)
        lines: list[str] = []
        limit_s = 1
        while not (await sbx.exec("test -e begun")).ok:  # a machine that stands still gives it no time to say anything
            lines.clear()
            program = "X=lost; echo begun; touch $OLDPWD/begun; sleep 100"
            result = await shell.run(program, timeout=limit_s, on_stdout=lines.append)
            limit_s *= 4
        assert (result.status, result.shell_restarted, lines) == ("timed_out", True, ["begun"])
        assert (await shell.run("echo $X")).stdout == "a b\n"
        assert (await shell.run("wc -c", stdin="x" * 5)).stdout.strip() == "5"
    await client.close()


async def test_the_record_of_an_ended_sandbox_is_readable(instance: Instance) -> None:
    client = AsyncClient(instance.api_url, instance.api_key)
    made = await AsyncSandbox.create(client=client)
    result = await made.exec("echo kept")
    await made.kill()
    ended = await AsyncSandbox.connect(made.id, client=client)
    assert [command.id for command in await ended.commands.list()] == [result.command_id]
    job = await ended.commands.get(result.command_id)
    assert (await job.wait()).stdout == "kept\n"
    with pytest.raises(SandboxGone, match="killed by") as caught:
        await ended.exec("true")
    assert caught.value.code == "sandbox_stopped"
    with pytest.raises(SandboxGone, match="killed by"):
        await ended.files.read("/etc/hostname")
    await client.close()
