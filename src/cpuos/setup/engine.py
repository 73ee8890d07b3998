"""Runs set-up's steps: a plan, then one at a time under a lock; what is done is skipped, so a rerun continues."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cpuos.errors import CpuosError, SetupRequired, Unavailable
from cpuos.settings import Settings
from cpuos.setup.host import CommandError, Host
from cpuos.setup.progress import Progress
from cpuos.setup.source import environment_path

__all__ = ["Step", "set_up", "setup_lock"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that set-up makes: how to see that it is there, how to make it. `run` may follow a failed `run`."""

    name: str
    plan: str
    """What it does, for the plan."""
    is_done: Callable[[Host], bool]
    run: Callable[[Host], None]
    download_mib: int = 0
    disk_mib: int = 0
    """What it leaves."""
    work_mib: int = 0
    """What it takes beside that until it is done."""
    duration_s: int = 1
    """Rough time on two cores and a fair line."""


def set_up(
    settings: Settings,
    steps: Sequence[Step],
    *,
    progress: Progress,
    hint: str = "cpuos setup",
    environment: Path | None = None,
    lock_wait_s: float = 1800,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Do the steps that are not done; returns their names. The first failure ends it and names the log.

    `environment` is where the package is installed for the daemons: `environment_path` of the code as it is now.
    """
    environment = environment or environment_path(settings)
    os.umask(0o022)  # what is installed must be readable by the daemons' users
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    logs = settings.data_dir / "logs"
    logs.mkdir(exist_ok=True)
    log_path = logs / f"setup-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(setup_lock(settings, progress=progress, wait_s=lock_wait_s, sleep=sleep))
        log = stack.enter_context(log_path.open("w", buffering=1))
        host = Host(settings, log=log, sleep=sleep, show=progress.line, environment=environment)
        pending = [step for step in steps if not step.is_done(host)]
        if not pending:
            log_path.unlink()
            return []
        _drop_old_logs(logs)
        _require_room(settings, pending)
        progress.plan(pending, done=len(steps) - len(pending), log=log_path)
        for number, step in enumerate(pending, 1):
            _do(step, host, progress=progress, number=number, total=len(pending), log_path=log_path, hint=hint)
    return [step.name for step in pending]


@contextlib.contextmanager
def setup_lock(
    settings: Settings, *, progress: Progress, wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Held by at most one set-up of a data directory; the kernel frees it when its holder dies."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    path = settings.data_dir / "setup.lock"
    with path.open("a+") as file:
        _take_lock(file, path, progress=progress, wait_s=wait_s, sleep=sleep)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _take_lock(file: IO[str], path: Path, *, progress: Progress, wait_s: float, sleep: Callable[[float], None]) -> None:
    waited = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            if waited >= wait_s:
                raise Unavailable(
                    f"cannot set up cpuOS: another set-up is running (process {holder})",
                    f"it holds {path}",
                    code="setup_required",
                    hint=f"ps -fp {holder}",
                ) from None
            if waited == 0:
                progress.line(f"waiting for another set-up (process {holder})")
            sleep(1)
            waited += 1


def _do(step: Step, host: Host, *, progress: Progress, number: int, total: int, log_path: Path, hint: str) -> None:
    host.note(f"== {step.name}: {step.plan}")
    started = time.monotonic()
    with progress.step(step, number=number, total=total):
        try:
            step.run(host)
        except CommandError as error:
            raise _failure(step, f"{error.what}\n{error.why}", log_path=log_path, hint=error.hint or hint) from error
        except CpuosError as error:
            raise _failure(step, f"{error.what}: {error.why}", log_path=log_path, hint=error.hint or hint) from error
        except OSError as error:
            raise _failure(step, str(error), log_path=log_path, hint=hint) from error
        if not step.is_done(host):
            raise _failure(step, "it ran to its end, but its result is not there", log_path=log_path, hint=hint)
    host.note(f"== {step.name}: done in {time.monotonic() - started:.1f} s")


def _failure(step: Step, why: str, *, log_path: Path, hint: str) -> SetupRequired:
    return SetupRequired(
        f"cannot set up cpuOS: the step {step.name!r} failed",
        f"{why}\nlog: {log_path}; what is done stays done, the next run continues here",
        hint=hint,
    )


def _require_room(settings: Settings, pending: Sequence[Step]) -> None:
    # They come one after the other.
    needed = sum(step.disk_mib for step in pending) + max((step.work_mib for step in pending), default=0)
    free = shutil.disk_usage(settings.data_dir).free >> 20
    if free < needed:
        raise SetupRequired(
            f"cannot set up cpuOS: {settings.data_dir} has {free} MiB free",
            f"the remaining steps need {needed} MiB",
            hint=f"df -h {settings.data_dir}",
        )


def _drop_old_logs(logs: Path, keep: int = 20) -> None:
    for path in sorted(logs.glob("setup-*.log"))[:-keep]:
        path.unlink(missing_ok=True)
