"""Commands through the gateway, against the real agent on loopback."""

from __future__ import annotations

from gateway_rig import DataClient, error_code

from cpuos.types.frames import FrameKind


async def test_streams_and_exit_code_are_apart(client: DataClient) -> None:
    stream = await client.exec("echo out; echo err >&2; exit 7")
    assert (stream.stdout, stream.stderr) == (b"out\n", b"err\n")
    assert stream.frames[0].kind is FrameKind.STARTED
    end = stream.end
    assert (end["status"], end["exit_code"], end["stdout_bytes"], end["stderr_bytes"]) == ("exited", 7, 4, 4)
    assert end["duration_s"] > 0


async def test_missing_program_ends_as_a_shell_tells_it(client: DataClient) -> None:
    end = (await client.exec(["no-such-program-here"])).end
    assert (end["status"], end["exit_code"]) == ("exited", 127)
    assert "no-such-program-here" in end["reason"]


async def test_unknown_user_and_folder_are_errors(client: DataClient) -> None:
    answer = await client.call("POST", "/commands", json={"command": "true", "cwd": "/", "user": "nobody-here"})
    assert (answer.status_code, error_code(answer)) == (422, "user_not_found")
    answer = await client.call("POST", "/commands", json={"command": "true", "cwd": "/no/such/folder"})
    assert (answer.status_code, error_code(answer)) == (404, "file_not_found")
