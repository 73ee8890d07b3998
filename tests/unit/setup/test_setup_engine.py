"""Set-up's engine with steps that only pretend: plan, order, resume, lock, retries, what a failure tells."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuos.errors import CpuosError, SetupRequired, Unavailable
from cpuos.live import duration_text, size_text
from cpuos.settings import Settings, load_settings
from cpuos.setup.engine import Step, set_up
from cpuos.setup.host import RETRY_DELAYS_S, CommandError, Host
from cpuos.setup.progress import LiveProgress, PlainProgress, QuietProgress
from cpuos.setup.source import command_lines
from cpuos.testing.waiting import wait_until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", state_dir=tmp_path / "state", run_dir=tmp_path / "run")


def step(name: str, run: Callable[[Host], None] | None = None, **rest: int) -> Step:
    """A step whose result is a file of its name."""

    def is_done(host: Host) -> bool:
        return (host.settings.data_dir / name).exists()

    def make(host: Host) -> None:
        (host.settings.data_dir / name).write_text("made")

    return Step(name=name, plan=f"makes {name}", is_done=is_done, run=run or make, **rest)


def run(settings: Settings, steps: list[Step], **rest: object) -> list[str]:
    options = {"progress": QuietProgress(), "sleep": lambda seconds: None, "environment": Path("/nowhere"), **rest}
    return set_up(settings, steps, **options)  # type: ignore[arg-type]


def test_does_what_is_not_done_and_then_nothing(settings: Settings) -> None:
    assert run(settings, [step("one"), step("two")]) == ["one", "two"]
    (settings.data_dir / "one").unlink()
    assert run(settings, [step("one"), step("two")]) == ["one"]
    assert run(settings, [step("one"), step("two")]) == []


def test_continues_where_it_stopped(settings: Settings) -> None:
    calls = []

    def fail(host: Host) -> None:
        calls.append("two")
        raise CommandError(["mmdebstrap", "x"], 25, tail=["E: mirror is away"])

    with pytest.raises(SetupRequired) as caught:
        run(settings, [step("one"), step("two", fail), step("three")], hint="make demo")
    assert caught.value.code == "setup_required"
    text = str(caught.value)
    assert "the step 'two' failed" in text
    assert "E: mirror is away" in text
    assert "exit status 25" in text
    assert text.splitlines()[-1] == "try: make demo"
    log = next(part.split(";")[0] for part in text.split("log: ")[1:])
    assert "== one: makes one" in Path(log).read_text()
    assert not (settings.data_dir / "three").exists()
    assert run(settings, [step("one"), step("two"), step("three")]) == ["two", "three"]


def test_a_step_without_result_is_a_failure(settings: Settings) -> None:
    with pytest.raises(SetupRequired, match="its result is not there"):
        run(settings, [step("one", lambda host: None)])


def test_a_lack_of_room_is_told_before_anything_is_done(settings: Settings) -> None:
    with pytest.raises(SetupRequired, match="MiB free"):
        run(settings, [step("one"), step("two", disk_mib=1 << 40)])
    assert not (settings.data_dir / "one").exists()


def test_room_is_also_needed_for_what_the_largest_step_works_with(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 300
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free << 20))
    steps = [step("one", disk_mib=100, work_mib=50), step("two", disk_mib=100, work_mib=100)]
    assert run(settings, steps) == ["one", "two"]
    free = 299
    with pytest.raises(SetupRequired, match="need 300 MiB"):
        run(settings, [step("three", disk_mib=100, work_mib=50), step("four", disk_mib=100, work_mib=100)])


def test_two_at_once_do_not_run(settings: Settings) -> None:
    settings.data_dir.mkdir()
    waits: list[float] = []
    with (settings.data_dir / "setup.lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="process 4711"):
            run(settings, [step("one")], lock_wait_s=3, sleep=waits.append)
    assert len(waits) == 3
    assert run(settings, [step("one")]) == ["one"]


def test_the_second_waits_for_the_first_and_finds_its_work_done(settings: Settings) -> None:
    settings.data_dir.mkdir()
    lock = (settings.data_dir / "setup.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def first_finishes(seconds: float) -> None:
        (settings.data_dir / "one").write_text("made")
        lock.close()

    assert run(settings, [step("one")], sleep=first_finishes) == []


def host_of(settings: Settings, **rest: object) -> Host:
    return Host(settings, log=io.StringIO(), **rest)  # type: ignore[arg-type]


def test_a_network_command_is_tried_again(settings: Settings, tmp_path: Path) -> None:
    waits: list[float] = []
    counter = tmp_path / "tries"
    script = f'echo x >> {counter}; echo mirror away; [ "$(wc -l < {counter})" -ge 3 ]'
    host_of(settings, sleep=waits.append).run(["sh", "-c", script], network=True)
    assert waits == list(RETRY_DELAYS_S[:2])


def test_tries_end(settings: Settings) -> None:
    waits: list[float] = []
    host = host_of(settings, sleep=waits.append)
    with pytest.raises(CommandError) as caught:
        host.run(["sh", "-c", "echo gone; exit 7"], network=True)
    assert caught.value.tail == ["gone"]
    assert waits == list(RETRY_DELAYS_S)


def test_other_commands_are_run_once(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(CommandError):
        host_of(settings, sleep=lambda seconds: pytest.fail("waited")).run(["false"])


def test_a_missing_program_is_told(settings: Settings) -> None:
    with pytest.raises(CommandError, match="no-such-program: exit status 127"):
        host_of(settings).run(["no-such-program"])
    assert host_of(settings).read(["no-such-program"]) is None
    assert host_of(settings).read(["false"]) is None
    assert host_of(settings).read(["echo", "hi"]) == "hi\n"


def test_plain_progress_is_one_line_a_step(settings: Settings) -> None:
    stream = io.StringIO()
    big = step("two", download_mib=2048, disk_mib=100, duration_s=150)
    run(settings, [step("one"), big], progress=PlainProgress(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("set-up: 2 steps to do, 0 done already; log: ")
    assert lines[2] == "  two  makes two: downloads 2.0 GiB, keeps 100 MiB, about 2 min 30 s"
    assert lines[3] == "  together downloads 2.0 GiB, keeps 100 MiB, takes about 2 min 31 s"
    assert lines[4].startswith("[1/2] one: makes one … done in ")
    assert lines[5].startswith("[2/2] two: makes two … done in ")
    assert len(lines) == 6


def test_plain_progress_tells_of_a_long_step(settings: Settings) -> None:
    stream = io.StringIO()

    def long(host: Host) -> None:
        host.show("compiling x")
        wait_until(lambda: "compiling x" in stream.getvalue())
        (host.settings.data_dir / "one").write_text("made")

    run(settings, [step("one", long), step("two")], progress=PlainProgress(stream, every_s=0.01))
    lines = stream.getvalue().splitlines()
    assert lines[4:6] == ["[1/2] one: makes one … ", "[1/2] one  compiling x"]
    assert lines[-2].startswith("[1/2] one: done in ")
    assert lines[-1].startswith("[2/2] two: makes two … done in ")


def test_live_progress_survives_any_output(settings: Settings) -> None:
    from rich.console import Console

    def noisy(host: Host) -> None:
        host.show("[red]not markup[/red] \x1b[2J \x07 and on")
        (host.settings.data_dir / "one").write_text("made")

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    run(settings, [step("one", noisy)], progress=LiveProgress(console))
    assert "done" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_an_interrupted_step_is_shown_as_failed(settings: Settings) -> None:
    def interrupt(host: Host) -> None:
        raise KeyboardInterrupt

    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run(settings, [step("one", interrupt)], progress=PlainProgress(stream))
    assert stream.getvalue().endswith("failed\n")
    assert run(settings, [step("one")]) == ["one"]


def test_words_for_sizes_and_times() -> None:
    assert [size_text(n) for n in (3, 1024, 1600)] == ["3 MiB", "1.0 GiB", "1.6 GiB"]
    assert [duration_text(n) for n in (1.26, 12.4, 125)] == ["1.3 s", "12 s", "2 min 5 s"]


def test_errors_of_ours_keep_their_hint(settings: Settings) -> None:
    def fail(host: Host) -> None:
        raise SetupRequired("cannot find uv", "no wheel", hint="apt-get install uv")

    with pytest.raises(CpuosError) as caught:
        run(settings, [step("one", fail)])
    assert caught.value.hint == "apt-get install uv"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a process namespace")
def test_a_killed_set_up_leaves_no_command_behind() -> None:
    seconds = f"1000.{os.getpid()}"
    code = (
        "import io, sys; from cpuos.settings import load_settings; from cpuos.setup.host import Host\n"
        "Host(load_settings(), log=io.StringIO(), show=lambda line: print(line, flush=True))"
        f".run(['sh', '-c', 'setsid sleep {seconds} & trap : TERM; echo ready; sleep {seconds}; wait'])"
    )

    def runs() -> bool:
        return any(f"\0{seconds}" in line for _, line in command_lines())

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert runs()
        child.kill()
        deadline = time.monotonic() + 30
        while runs():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_interrupted_command_is_ended(settings: Settings) -> None:
    seconds = f"1001.{os.getpid()}"

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host_of(settings, show=interrupt).run(["sh", "-c", f"echo ready; exec sleep {seconds}"])
    assert not any(f"\0{seconds}" in line for _, line in command_lines())
