# Generated from tests/unit/client/test_async_exec.py by scripts/gen_sync.py; edit that.
"""exec, spawn and what is recorded, against a scripted gateway."""

from __future__ import annotations

import io
import re

import pytest

from cpuos import PIPE, Client, CommandFailed, Sandbox
from cpuos.errors import InvalidRequest, LimitReached, OutputLost, PlatformError, SandboxGone, Unavailable
from unit.client.fake_api import FakeApi, Fault, Program

COMMANDS = r"/v1/sandboxes/\w+/commands"


def test_result_has_output_and_end(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", b"out\n"), ("stderr", b"err\n")], exit_code=7)
    with Sandbox.create() as sbx:
        result = sbx.exec("make it", cwd="/tmp", env={"A": "b"}, user="root", timeout="2m")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("exited", 7, "out\n", "err\n")
    assert not result.ok
    assert not result.truncated
    assert api.calls("POST", COMMANDS)[0].body == (
        b'{"command":"make it","cwd":"/tmp","env":{"A":"b"},"user":"root","timeout_s":120.0}'
    )
    assert api.killed == [sbx.id]


def test_one_exec_is_one_request(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        sbx.exec("true")
        before = len(api.seen)
        sbx.exec(["true"])
        assert len(api.seen) == before + 1


@pytest.mark.parametrize("frame_bytes", [1, 2, 7, 1 << 16])
def test_callbacks_get_whole_lines(api: FakeApi, frame_bytes: int) -> None:
    text = "äöü\n\nzwei 🤣 drei\nlast".encode()
    api.frame_bytes = frame_bytes
    api.program = lambda start: Program([("stdout", text), ("stderr", b"e1\ne2\n")])
    lines: list[str] = []
    errors: list[str] = []
    with Sandbox.create() as sbx:
        result = sbx.exec("x", on_stdout=lines.append, on_stderr=errors.append)
    assert lines == ["äöü", "", "zwei 🤣 drei", "last"]
    assert errors == ["e1", "e2"]
    assert result.stdout_raw == text
    assert "tail" not in api.calls("POST", COMMANDS)[0].query


def test_a_stream_cut_anywhere_is_resumed(api: FakeApi, delays: list[float]) -> None:
    output = [("stdout", b"abc\n"), ("stderr", b"\xff\x00"), ("stdout", "üd\n".encode())]
    api.frame_bytes = 2
    api.program = lambda start: Program(output, exit_code=3)
    with Sandbox.create() as sbx:
        for cut in range(0, 1400, 7):
            api.faults = [Fault("POST", COMMANDS, cut_after=cut), Fault("GET", f"{COMMANDS}/.*", cut_after=cut // 2)]
            lines: list[str] = []
            result = sbx.exec("x", on_stdout=lines.append)
            assert result.stdout_raw == "abc\nüd\n".encode()
            assert result.stderr_raw == b"\xff\x00"
            assert result.exit_code == 3
            assert lines == ["abc", "üd"]
    assert len(api.commands) == 200, "a repeated start must attach, never start a second command"


def test_a_stream_that_stays_cut_is_an_error_not_a_result(api: FakeApi, delays: list[float]) -> None:
    api.program = lambda start: Program([("stdout", b"a" * 200_000)])
    api.faults = [Fault("POST", COMMANDS, cut_after=100_000)]
    api.faults += [Fault("GET", f"{COMMANDS}/.*/stream", cut_after=0) for _ in range(50)]
    with Sandbox.create() as sbx:
        with pytest.raises(OutputLost) as caught:
            sbx.exec("x")
        api.faults = []
    assert caught.value.code == "stream_cut"
    received = caught.value.details.pop("stdout")
    assert 65536 < received < 100_000  # of the frame that was cut, what came counts
    assert caught.value.details == {"command_id": "command000000000", "stderr": 0}
    assert len(delays) < 20


def test_head_and_tail_with_exact_counts(api: FakeApi) -> None:
    data = b"H" * 70_000 + "ü".encode() * 70_000 + b"T" * 70_000
    api.program = lambda start: Program([("stdout", data), ("stderr", b"small")])
    with Sandbox.create() as sbx:
        result = sbx.exec("x", max_output="100KiB")
    assert result.truncated
    assert result.stdout_bytes == len(data)
    assert len(result.stdout_raw) + result.stdout_dropped_bytes == len(data)
    assert 100 * 1024 - 8 <= len(result.stdout_raw) <= 100 * 1024
    assert result.stdout.startswith("H" * 51200)
    assert result.stdout.endswith("T" * 51200)
    assert "\ufffd" not in result.stdout
    assert result.stderr == "small"
    assert result.stderr_dropped_bytes == 0
    assert api.calls("POST", COMMANDS)[0].query["tail"] == "51200"


def test_a_gap_is_counted(api: FakeApi) -> None:
    api.frame_bytes = 10
    api.program = lambda start: Program([("stdout", b"0123456789" * 10)], dropped=(30, 80))
    lines: list[str] = []
    with Sandbox.create() as sbx:
        result = sbx.exec("x", on_stdout=lines.append)
        job = sbx.commands.get(result.command_id)
        with pytest.raises(OutputLost) as caught:
            job.output()
        assert job.output(offset=80) == b"0123456789" * 2
    assert result.stdout_raw == b"0123456789" * 5
    assert result.stdout_dropped_bytes == 50
    assert lines == ["0123456789" * 3, "0123456789" * 2]
    assert caught.value.hint == "job.output('stdout', offset=80)"


def test_check_raises_with_the_result(api: FakeApi) -> None:
    api.program = lambda start: Program([("stderr", b"Traceback\nValueError: no\n\n")], exit_code=1)
    with Sandbox.create() as sbx, pytest.raises(CommandFailed) as caught:
        sbx.exec("x", check=True)
    assert (caught.value.code, caught.value.result.exit_code) == ("command_failed", 1)
    assert str(caught.value).startswith("command command000000000 failed: exit code 1\nValueError: no\ntry: ")


def test_timed_out_is_a_result_with_output(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", b"1\n2\n")], status="timed_out", exit_code=None)
    with Sandbox.create() as sbx:
        result = sbx.exec("x", timeout=4)
    assert (result.status, result.stdout, result.ok) == ("timed_out", "1\n2\n", False)


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [("sandbox_lost", SandboxGone, "sandbox_lost"), ("unknown", PlatformError, "end_unknown")],
)
def test_platform_failures_raise_and_carry_the_output(api: FakeApi, status: str, error: type, code: str) -> None:
    api.program = lambda start: Program([("stdout", b"part")], status=status, exit_code=None, reason="it died")
    with Sandbox.create() as sbx, pytest.raises(error) as caught:
        sbx.exec("x")
    assert (caught.value.result.stdout, caught.value.code) == ("part", code)


@pytest.mark.parametrize("size", [0, 1, 300_000])
@pytest.mark.parametrize("kind", ["bytes", "file", "pieces"])
def test_stdin_arrives(api: FakeApi, size: int, kind: str) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    given = {"bytes": data, "file": io.BytesIO(data), "pieces": [data]}[kind]
    api.program = lambda start: Program()
    with Sandbox.create() as sbx:
        job = sbx.spawn("cat", stdin=given)
        assert api.stdin(job.id) == data
        assert b'"stdin":"open"' in api.calls("POST", COMMANDS)[0].body


def test_exec_feeds_stdin_while_it_follows(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        result = sbx.exec("cat", stdin="text ü")
        assert result.ok
    assert len(api.calls("POST", f"{COMMANDS}/.*/stdin")) <= 2


def test_interactive_stdin(api: FakeApi) -> None:
    api.program = lambda start: Program(hold=True)
    with Sandbox.create() as sbx:
        job = sbx.spawn("cat", stdin=PIPE)
        job.write_stdin("ab")
        job.write_stdin(b"cd")
        job.close_stdin()
        assert api.stdin(job.id) == b"abcd"
        assert api.calls("POST", f"{COMMANDS}/.*/stdin")[-1].query == {"offset": "4", "end": "true"}
        job.kill()
        assert (job.wait()).status == "killed"


def test_wait_with_a_timeout_tells_what_is_known(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", b"0123456789" * 100)], hold=True)
    with Sandbox.create() as sbx:
        job = sbx.spawn("x", max_output=100)
        result = job.wait(timeout=0.01)
        assert (result.status, result.exit_code, result.ok) == ("running", None, False)
        assert result.stdout == "0123456789" * 10
        assert result.stdout_dropped_bytes == 900
        job.kill()
        assert (job.wait(timeout="10s")).status == "killed"


def test_list_get_follow(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", b"ab"), ("stderr", b"c")])
    with Sandbox.create() as sbx:
        job = sbx.spawn("x")
        assert [known.id for known in sbx.commands.list()] == [job.id]
        events = [event for event in (sbx.commands.get(job.id)).follow()]
        assert [(event.stream, event.data) for event in events] == [("stdout", b"ab"), ("stderr", b"c")]
        with pytest.raises(Exception, match="command_not_found"):
            sbx.commands.get("zzz")


def test_a_stale_ticket_is_renewed(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        api.ticket = "ticket-2"
        assert (sbx.exec("true")).ok
        assert len(api.calls("POST", r".*/access")) == 1
    assert len(api.commands) == 1


def test_restarting_parts_are_waited_for(api: FakeApi, delays: list[float]) -> None:
    with Sandbox.create() as sbx:
        api.faults = [Fault("POST", COMMANDS, error="gateway_unavailable"), Fault("POST", COMMANDS, close=True)]
        assert (sbx.exec("true")).ok
    assert len(delays) == 1, "a kept connection that just closed is replaced at once"
    assert len(api.commands) == 1


def test_a_burst_over_the_limit_is_queued(api: FakeApi, delays: list[float]) -> None:
    with Sandbox.create() as sbx:
        api.faults = [Fault("POST", COMMANDS, error="limit_reached", details={"limit": "commands"})] * 3
        assert (sbx.exec("true")).ok
        assert len(delays) == 3
        api.faults = [Fault("POST", COMMANDS, error="limit_reached", details={"limit": "commands"})] * 1000
        with pytest.raises(LimitReached):
            sbx.exec("true")
        api.faults = [Fault("POST", COMMANDS, error="limit_reached", details={"limit": "other"})]
        with pytest.raises(LimitReached):
            sbx.exec("true")


def test_a_failing_callback_kills_the_command(api: FakeApi) -> None:
    api.program = lambda start: Program([("stdout", b"a\n")], hold=True)

    def fail(line: str) -> None:
        raise KeyError(line)

    with Sandbox.create() as sbx, pytest.raises(KeyError):
        sbx.exec("x", on_stdout=fail)
    assert [record["status"] for record in api.commands.values()] == ["killed"]


def test_wrong_arguments_are_told_at_once(api: FakeApi) -> None:
    with Sandbox.create() as sbx:
        before = len(api.seen)
        for arguments in (
            {"command": []},
            {"command": b"true"},
            {"command": ["a", 1]},
            {"command": "a\0b"},
            {"command": "x", "timeout": "soon"},
            {"command": "x", "timeout": -1},
            {"command": "x", "user": "a b"},
            {"command": "x", "env": {"A=B": "c"}},
            {"command": "x", "stdin": 5},
            {"command": "x", "stdin": PIPE},
            {"command": "x", "max_output": "lots"},
            {"command": "caf\udce9"},
        ):
            with pytest.raises(InvalidRequest):
                sbx.exec(**arguments)
        assert len(api.seen) == before


def test_no_server_says_what_to_do(monkeypatch: pytest.MonkeyPatch, delays: list[float]) -> None:
    with pytest.raises(Unavailable) as caught:
        Sandbox.create(client=Client("http://127.0.0.1:9", "cpk_x"))
    assert caught.value.code == "server_unavailable"
    assert re.fullmatch(r"cannot reach the cpuOS server: http://127.0.0.1:9\n.+\ntry: cpuos up", str(caught.value))
    assert sum(delays) < 1
