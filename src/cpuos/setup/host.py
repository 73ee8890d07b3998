"""How set-up acts on the machine: commands with a log, retries and a time for each; a test hands in a fake."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from cpuos.errors import SetupRequired
from cpuos.settings import Settings

__all__ = ["RETRY_DELAYS_S", "CommandError", "Host"]

RETRY_DELAYS_S = (5.0, 15.0, 30.0, 60.0, 120.0)
"""Package mirrors drop out for minutes; together these outlast the usual gap."""

# A process namespace dies with its first process, that one with its parent, and that one with us.
_CONTAINMENT = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "--"),
)


class CommandError(SetupRequired):
    """A command of set-up failed; `tail` is the end of what it printed."""

    def __init__(self, argv: Sequence[str], status: int, *, tail: Sequence[str]) -> None:
        super().__init__(f"cannot run {argv[0]}: exit status {status}", "\n".join(tail))
        self.argv = list(argv)
        self.tail = list(tail)


class Host:
    """Runs commands on this machine for one set-up, and writes down everything they print."""

    def __init__(
        self,
        settings: Settings,
        *,
        log: IO[str],
        sleep: Callable[[float], None] = time.sleep,
        show: Callable[[str], None] = lambda line: None,
        environment: Path = Path(sys.prefix),
    ) -> None:
        self.settings = settings
        self.environment = environment
        """Where the package goes that the daemons run from."""
        self.show = show
        """Called with each line that the operator may want to see while a step runs."""
        self._log = log
        self._sleep = sleep

    def note(self, text: str) -> None:
        """Write a line of our own to the log."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._log.flush()

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        network: bool = False,
        contained: bool = True,
    ) -> None:
        """Run to the end; with `network` it is tried again, with pauses, before it counts as failed.

        When set-up is killed, a `contained` command and all that it started die with it: the next set-up works in the
        same folders. Off for what must not be cut short, such as the system's package manager.
        """
        words = [str(part) for part in argv]
        delays = RETRY_DELAYS_S if network else ()
        prefix = _CONTAINMENT if contained and os.geteuid() == 0 else ()
        self.retry(lambda: self._run_once(words, prefix=prefix, cwd=cwd, env=env), delays=delays)

    def retry(self, action: Callable[[], None], *, delays: Sequence[float] = RETRY_DELAYS_S) -> None:
        """Do `action`; when it raises `CommandError`, wait and do it again, once for each of `delays`."""
        for delay in delays:
            try:
                return action()
            except CommandError as error:
                last = error.tail[-1] if error.tail else str(error)
                self.note(f"failed, next try in {delay:.0f} s: {last}")
                self.show(f"next try in {delay:.0f} s: {last}")
                self._sleep(delay)
        return action()

    def read(
        self, argv: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str | None:
        """What a quick command prints; None when it is missing or fails."""
        try:
            done = subprocess.run(
                [str(part) for part in argv],
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=60,
                stdin=subprocess.DEVNULL,
                env=_environment(env),
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def _run_once(
        self, argv: list[str], *, prefix: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None
    ) -> None:
        self.note("$ " + " ".join(argv))
        tail: collections.deque[str] = collections.deque(maxlen=12)
        try:
            process = subprocess.Popen(
                [*prefix, *argv],
                cwd=cwd,
                env=_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise CommandError(argv, 127, tail=[error.strerror or str(error)]) from error
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self._log.write(line)
                    if line.strip():
                        tail.append(line.rstrip())
                        self.show(line.strip())
            except BaseException:
                process.kill() if prefix else process.terminate()
                raise
        self._log.flush()
        if process.returncode != 0:
            raise CommandError(argv, process.returncode, tail=list(tail))


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    base = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    for name, place in (("HOME", "/root"), ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")):
        base.setdefault(name, place)
    return {**base, **(extra or {})}
