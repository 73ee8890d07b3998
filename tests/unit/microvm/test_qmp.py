"""What a VMM says while its machine is saved may be a guest's doing: it is bounded in size and time, and never believed
for more than it is."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuos.runtimes.microvm.qemu import Qemu
from cpuos.runtimes.microvm.qmp import Qmp, go_on, load_state, save_state, standing_still

GREETING = {"QMP": {"version": {}}}
Answers = Callable[[str, dict], object]


class Vmm:
    """Answers each command as it is told; `said` is what came."""

    def __init__(self, path: Path, answers: Answers) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._answers = answers
        self.said: list[str] = []
        self.given: list[int] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for descriptor in self.given:
            os.close(descriptor)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.sendall(json.dumps(GREETING).encode() + b"\n")
        rest = b""
        while True:
            piece, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
            self.given += descriptors
            if not piece:
                return
            rest += piece
            while b"\n" in rest:
                line, _, rest = rest.partition(b"\n")
                message = json.loads(line)
                self.said.append(message["execute"])
                answer = self._answers(message["execute"], message.get("arguments", {}))
                if answer is None:
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
                try:
                    connection.sendall(data)
                except OSError:
                    return


@contextmanager
def vmm(folder: Path, answers: Answers) -> Iterator[tuple[Path, Vmm]]:
    path = folder / "control"
    made = Vmm(path, answers)
    try:
        yield path, made
    finally:
        made.close()


def well(command: str, arguments: dict) -> object:
    said = {"query-migrate": {"status": "completed"}, "query-status": {"status": "paused"}}
    return {"return": said.get(command, {})}


def saving(machine: list[Vmm], state: bytes, status: str = "completed") -> Answers:
    """Writes this as its state, and says that it has come so far."""

    def answers(command: str, arguments: dict) -> object:
        if command == "migrate":
            descriptor = machine[0].given.pop()
            threading.Thread(target=_write, args=(descriptor, state), daemon=True).start()
        return {"return": {"status": status}} if command == "query-migrate" else {"return": {}}

    return answers


def _write(descriptor: int, data: bytes) -> None:
    try:
        with os.fdopen(descriptor, "wb") as pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass


@pytest.mark.parametrize("memory", [False, True])
def test_a_state_is_written_down_and_the_machine_runs_on(tmp_path: Path, memory: bool) -> None:
    machine: list[Vmm] = []
    with vmm(tmp_path, saving(machine, b"state" * 1000)) as (path, made), (tmp_path / "state").open("wb") as target:
        machine.append(made)
        with standing_still(path, timeout_s=10) as qmp:
            save_state(qmp, target.fileno(), memory=memory, limit_bytes=1 << 20)
        assert (tmp_path / "state").read_bytes() == b"state" * 1000
        assert (made.said[1], made.said[-1]) == ("stop", "cont")


def test_one_that_writes_without_end_is_cut_off_and_runs_on(tmp_path: Path) -> None:
    machine: list[Vmm] = []
    with vmm(tmp_path, saving(machine, bytes(1 << 20))) as (path, made), (tmp_path / "state").open("wb") as target:
        machine.append(made)
        with pytest.raises(OSError, match="larger than 4096"), standing_still(path, timeout_s=10) as qmp:
            save_state(qmp, target.fileno(), memory=False, limit_bytes=4096)
        assert made.said[-1] == "cont"
    assert (tmp_path / "state").stat().st_size <= 4096


def test_a_save_that_failed_says_so(tmp_path: Path) -> None:
    machine: list[Vmm] = []
    answers = saving(machine, b"half", status="failed")
    with vmm(tmp_path, answers) as (path, made), (tmp_path / "state").open("wb") as target:
        machine.append(made)
        with pytest.raises(OSError, match="could not be saved"), standing_still(path, timeout_s=10) as qmp:
            save_state(qmp, target.fileno(), memory=False, limit_bytes=4096)


def test_a_state_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    with vmm(tmp_path, well) as (path, _), (tmp_path / "state").open("wb") as target:
        began = time.monotonic()
        with pytest.raises(OSError, match="in time"), Qmp(path, timeout_s=0.3) as qmp:
            save_state(qmp, target.fileno(), memory=False, limit_bytes=4096)
        assert time.monotonic() - began < 5


ANSWERS = [
    (b"x" * (2 << 20), "without an end"),
    (b"no json\n", "something else"),
    (b"[1, 2]\n", "something else"),
    (b'{"error": 1}\n', "something else"),
    ({"error": {"desc": "no"}}, "no"),
    (None, "closed"),
    (b'{"event": "X"}\n', "timed out"),
    (b'{"event": "X"}\n' * 1_000_000, "without end|timed out|read operation"),
    (b"[" * 500_000 + b"\n", "something else"),
]


@pytest.mark.parametrize(("answer", "why"), ANSWERS)
def test_what_it_answers_is_not_believed(tmp_path: Path, answer: object, why: str) -> None:
    with vmm(tmp_path, lambda command, arguments: answer) as (path, _), pytest.raises(OSError, match=why):
        go_on(path, timeout_s=0.5)


@pytest.mark.parametrize(("answer", "why"), [*ANSWERS, (b'{"return": []}\n', "")])
async def test_what_it_says_of_its_state_is_not_believed(tmp_path: Path, answer: object, why: str) -> None:
    with vmm(tmp_path, lambda command, arguments: answer) as (path, _):
        if not why:
            assert await Qemu(kvm=False).ask_state(path, timeout_s=5) == "it says nothing of its state"
            return
        with pytest.raises(OSError):
            await Qemu(kvm=False).ask_state(path, timeout_s=0.5)


def test_one_that_says_nothing_of_its_save_goes_on(tmp_path: Path) -> None:
    with vmm(tmp_path, lambda command, arguments: b'{"return": []}\n') as (path, made):
        go_on(path, timeout_s=5)
        assert made.said[-1] == "cont"


def test_a_machine_is_taken_up_and_told_to_run(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"state")
    with vmm(tmp_path, well) as (path, made):
        load_state(path, tmp_path / "state", memory=False, timeout_s=10)
        assert made.said[-1] == "cont"
        assert os.pread(made.given[0], 10, 0) == b"state"


def test_one_that_does_not_come_up_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"state")

    def never(command: str, arguments: dict) -> object:
        return {"return": {"status": "inmigrate"}}

    with vmm(tmp_path, never) as (path, _), pytest.raises(OSError, match="it stays inmigrate"):
        load_state(path, tmp_path / "state", memory=False, timeout_s=0.2)


def test_a_save_that_nobody_ends_is_cancelled(tmp_path: Path) -> None:
    told = iter(["active", "cancelled"])

    def answers(command: str, arguments: dict) -> object:
        return {"return": {"status": next(told)}} if command == "query-migrate" else {"return": {}}

    with vmm(tmp_path, answers) as (path, made):
        go_on(path, timeout_s=10)
        assert made.said[1:] == ["query-migrate", "migrate_cancel", "query-migrate", "cont"]
