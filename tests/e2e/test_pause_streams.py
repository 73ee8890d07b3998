"""What clients hold while a real sandbox is paused and resumed: streams, terminals, stdin, previews, transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_previews import Page, start

from cpuos import PIPE, Client, Sandbox
from cpuos.errors import CpuosError, Unavailable
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]
SERVER = "tests/preview_server.py"


@pytest.fixture(scope="module")
def sandbox(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create(client=client, memory="512MiB", disk="512MiB", timeout="30m") as sandbox:
        yield sandbox


class Background:
    """A call in a thread of its own: what a client does meanwhile."""

    def __init__(self, work: Any) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Any) -> None:
        try:
            self._outcome.append(work())
        except BaseException as error:
            self._outcome.append(error)

    def result(self, *, within_s: float = 120) -> Any:
        self._thread.join(within_s)
        assert self._outcome, "it has not ended"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]


def test_a_stream_has_each_byte_once(sandbox: Sandbox) -> None:
    script = "for i in $(seq 400); do seq 1 1000; sleep 0.005; done; exit 5"
    job = sandbox.spawn(script)
    collected = bytearray()

    def follow() -> int:
        for event in job.follow():
            collected.extend(event.data)
        return job.wait().exit_code

    reader = Background(follow)
    for _ in range(4):
        size = len(collected)
        wait_until(lambda size=size: len(collected) > size + 10_000)
        sandbox.pause()
        size = len(collected)
        time.sleep(0.3)
        assert len(collected) == size
        sandbox.resume()
    assert reader.result() == 5
    assert bytes(collected) == b"".join(b"%d\n" % number for number in range(1, 1001)) * 400


def test_calls_resume_it_and_go_on(sandbox: Sandbox) -> None:
    job = sandbox.spawn("cat", stdin=PIPE)
    job.write_stdin("before\n")
    sandbox.pause()
    assert sandbox.refresh().state == "paused"
    assert next(command.id for command in sandbox.commands.list()) == job.id
    assert sandbox.refresh().state == "paused"
    job.write_stdin("meanwhile\n")
    wait_until(lambda: sandbox.refresh().state == "running")  # told a moment after the call went on
    sandbox.pause()
    sandbox.files.write("/workspace/paused", b"written")
    assert sandbox.files.read("/workspace/paused") == b"written"
    sandbox.pause()
    assert sandbox.exec("cat /workspace/paused").stdout == "written"
    job.close_stdin()
    assert job.wait().stdout == "before\nmeanwhile\n"


def test_a_terminal_with_jobs_sees_nothing(sandbox: Sandbox) -> None:
    seen = bytearray()
    with sandbox.pty("/bin/bash --norc") as terminal:

        def read() -> None:
            for piece in terminal:
                seen.extend(piece)

        reader = Background(read)
        terminal.send("PS1='> '; sleep 300 & sleep 301 & echo rea''dy\n")
        wait_until(lambda: b"ready" in seen)
        for _ in range(2):
            sandbox.pause()
            sandbox.resume()
        sandbox.pause()
        terminal.send("jobs; echo do''ne\n")  # keys resume it
        wait_until(lambda: b"done" in seen)
        terminal.send("kill %1 %2; wait; exit\n")
        reader.result()
    assert seen.count(b"Running") == 2
    assert b"Stopped" not in seen


def test_a_preview_resumes_it(instance: Instance, sandbox: Sandbox) -> None:
    with open(SERVER, "rb") as server:
        sandbox.files.write("/workspace/server.py", server.read())
    job = start(sandbox, 3000)
    page = Page(instance, sandbox.ports.url(3000))
    assert page.ask("/")[0].status == 200
    sandbox.pause()
    assert page.ask("/", token=False)[0].status == 401
    assert sandbox.refresh().state == "paused"
    assert page.ask("/")[0].status == 200
    wait_until(lambda: sandbox.refresh().state == "running")
    job.kill()


def test_without_auto_resume_calls_are_refused(client: Client) -> None:
    with Sandbox.create(client=client, memory="512MiB", disk="512MiB", auto_resume=False) as sandbox:
        sandbox.pause()
        with pytest.raises(Unavailable) as refused:
            sandbox.exec("true")
        assert refused.value.code == "sandbox_paused"
        assert sandbox.refresh().state == "paused"
        sandbox.resume()
        assert sandbox.exec("echo back").stdout == "back\n"


@pytest.mark.parametrize("part", ["gateway", "node", "server"])
def test_parts_that_die_while_it_is_paused(instance: Instance, sandbox: Sandbox, part: str) -> None:
    job = sandbox.spawn("for i in $(seq 300); do echo $i; sleep 0.01; done")
    wait_until(lambda: job.output())
    sandbox.pause()
    instance.kill(part)
    instance.wait_ready()
    result = Background(job.wait)

    def works() -> bool:
        try:
            return sandbox.exec("echo works").stdout == "works\n"
        except CpuosError:
            return False

    wait_until(works, within_s=60)
    assert result.result().stdout == "".join(f"{number}\n" for number in range(1, 301))
