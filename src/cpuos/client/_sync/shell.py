# Generated from src/cpuos/client/_async/shell.py by scripts/gen_sync.py; edit that.
"""A kept shell: what one run leaves (directory, variables, functions …), the next one finds."""

from __future__ import annotations

import dataclasses
import os
from types import TracebackType

from cpuos.client._backend_sync import Lock, shielded
from cpuos.client._shell import MAX_TEXT_ARGUMENT, ShellState, shell_argv
from cpuos.client._sink import LineCallback
from cpuos.client._stdin import Stdin
from cpuos.client._sync.commands import Commands
from cpuos.client._sync.files import Files
from cpuos.client.result import Result
from cpuos.errors import CpuosError, FileProblem

__all__ = ["Shell"]


class Shell:
    """Runs texts one after the other as if they were typed into one bash; no text can spoil a later run.

    Each run is a bash of its own that takes over the state the last one left, so `exit`, `set -e`, an open quote or
    a heredoc without its end concern that run alone. A run whose end left no state to read (killed, timed out,
    replaced by `exec`) has `shell_restarted` set: its changes are lost, the next run starts from the state before.
    """

    def __init__(self, commands: Commands, files: Files, *, user: str | None, cwd: str) -> None:
        self._commands = commands
        self._files = files
        self._user = user
        # Hidden, and of a name that no other shell has.
        self._state = ShellState(directory=f"/var/tmp/.cpuos-shell-{os.urandom(8).hex()}", cwd=cwd)
        # Guards the state: two runs at once would each start from the other's past.
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._commands.sandbox_id}>"

    def run(
        self,
        command: str,
        *,
        timeout: str | float | None = None,
        stdin: Stdin | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
        check: bool = False,
        max_output: str | int = "1MiB",
    ) -> Result:
        """Run a text of any number of lines; the arguments are those of `exec`. Runs wait for each other."""
        with self._lock:
            if len(command.encode()) > MAX_TEXT_ARGUMENT:
                self._files.write(self._state.text_path, command, user=self._user)
            result = self._commands.exec(
                shell_argv(command, self._state),
                cwd="/",
                user=self._user,
                timeout=timeout,
                stdin=stdin,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                max_output=max_output,
            )
            self._state, lost = self._state.after(self._read_status(), exit_status=result.exit_code)
        if lost:
            result = dataclasses.replace(result, shell_restarted=True)
        return result.check() if check else result

    def close(self) -> None:
        """Remove what is kept inside the sandbox."""
        try:
            self._files.remove(self._state.directory, recursive=True, user=self._user)
        except FileProblem:
            # No run has been, or a run removed it.
            return

    def _read_status(self) -> bytes | None:
        try:
            return self._files.read(self._state.status_path, user=self._user)
        except FileProblem:
            return None

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            shielded(self.close, timeout_s=5.0)
        except CpuosError:
            if error is None:
                raise
