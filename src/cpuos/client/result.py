"""Result: how a command ended and what it printed. Never invented: each field comes from the node's record."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuos.client._output import Kept, decode_kept
from cpuos.errors import CommandFailed, CpuosError, PlatformError, SandboxGone
from cpuos.types.command import Command, CommandStatus
from cpuos.types.limits import ReachedLimit
from cpuos.types.network import RefusedConnection

__all__ = ["Result", "make_result", "raise_platform_failure"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """End of one command. A non-zero exit code is a result, not an exception; `ok` is exit code 0.

    When more than `max_output` bytes came on a stream, `stdout` is its head and its tail one after the other and
    `stdout_dropped_bytes` says how many bytes stood between. `output_path` is the folder inside the sandbox that
    has the full copies.
    """

    command_id: str
    status: CommandStatus
    exit_code: int | None
    """Only with status exited. It is the guest's word."""
    signal: int | None
    stdout: str
    stderr: str
    stdout_raw: bytes = field(repr=False)
    stderr_raw: bytes = field(repr=False)
    duration_s: float | None
    stdout_bytes: int = 0
    """All that the program wrote, dropped bytes included."""
    stderr_bytes: int = 0
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    output_path: str | None = None
    refused_connections: list[RefusedConnection] | None = None
    """What the sandbox was refused while the command ran, in words. None: not known, or not looked for, as with
    commands that exit with code 0 within 50 ms."""
    limit: str | None = None
    limit_reached: ReachedLimit | None = None
    """The limit that says most about its end, with what can be done about it; also of a command that exited."""
    reason: str = ""
    shell_restarted: bool = False
    """Only of `Shell.run`: what this run changed in the shell could not be read back and is lost."""

    @property
    def ok(self) -> bool:
        """It exited with code 0."""
        return self.status is CommandStatus.EXITED and self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Some output stands in neither `stdout` nor `stderr`: the numbers of dropped bytes say how much."""
        return bool(self.stdout_dropped_bytes or self.stderr_dropped_bytes)

    def check(self) -> Result:
        """This result when it is ok; else raises CommandFailed, which carries it."""
        if self.ok:
            return self
        ending = f"exit code {self.exit_code}" if self.status is CommandStatus.EXITED else str(self.status)
        why = self.reason or next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        raise CommandFailed(
            f"command {self.command_id} failed: {ending}", why, result=self, details={"command_id": self.command_id}
        )


def make_result(command: Command, *, stdout: Kept, stderr: Kept) -> Result:
    return Result(
        command_id=command.id,
        status=command.status,
        exit_code=command.exit_code,
        signal=command.signal,
        stdout=decode_kept(stdout),
        stderr=decode_kept(stderr),
        stdout_raw=stdout.head + stdout.tail,
        stderr_raw=stderr.head + stderr.tail,
        duration_s=command.duration_s,
        stdout_bytes=len(stdout.head) + len(stdout.tail) + stdout.dropped,
        stderr_bytes=len(stderr.head) + len(stderr.tail) + stderr.dropped,
        stdout_dropped_bytes=stdout.dropped,
        stderr_dropped_bytes=stderr.dropped,
        output_path=command.output_path,
        refused_connections=command.refused_connections,
        limit=command.limit,
        limit_reached=command.limit_reached,
        reason=command.reason,
    )


def raise_platform_failure(result: Result) -> None:
    """A sandbox that died and an end that nobody saw are failures of the platform, not the command's own."""
    error: CpuosError
    if result.status is CommandStatus.SANDBOX_LOST:
        error = SandboxGone(
            f"cannot tell how command {result.command_id} ended: its sandbox died", result.reason, code="sandbox_lost"
        )
    elif result.status is CommandStatus.UNKNOWN:
        error = PlatformError(f"cannot tell how command {result.command_id} ended", result.reason, code="end_unknown")
    else:
        return
    error.details["command_id"] = result.command_id
    error.result = result  # type: ignore[attr-defined]
    raise error
