# Generated from src/cpuos/client/_async/commands.py by scripts/gen_sync.py; edit that.
"""Commands of a sandbox: exec to the end, spawn and come back later, and what was recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from cpuos.client._backend_sync import Background, shielded
from cpuos.client._parse import parse_answer
from cpuos.client._sink import LineCallback, OutputSink
from cpuos.client._start import encode_start, new_key
from cpuos.client._stdin import PIPE, Stdin, stdin_pieces
from cpuos.client._stream import CommandStream
from cpuos.client._sync.connection import Gateway
from cpuos.client._sync.job import Job, feed_stdin, follow, kill_quietly
from cpuos.client.result import Result, raise_platform_failure
from cpuos.errors import CpuosError, InvalidRequest
from cpuos.types.command import Command, CommandList

__all__ = ["Commands"]


class Commands:
    """`sbx.commands`: run and find commands."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def sandbox_id(self) -> str:
        """Id of the sandbox."""
        return self._gateway.sandbox_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._gateway.sandbox_id}>"

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: str | float | None = None,
        stdin: Stdin | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
        check: bool = False,
        max_output: str | int = "1MiB",
    ) -> Result:
        """Run to the end: see `Sandbox.exec`."""
        if stdin is PIPE:
            raise InvalidRequest(
                "cannot run command: stdin=PIPE", "exec waits for the end", hint="sbx.spawn(…, stdin=PIPE)"
            )
        pieces = None if stdin is None else stdin_pieces(stdin)
        body = encode_start(command, cwd=cwd, env=env, user=user, timeout=timeout, open_stdin=pieces is not None)
        sink = OutputSink(on_stdout=on_stdout, on_stderr=on_stderr, max_output=max_output)
        stream = CommandStream()
        key = new_key()
        try:
            if pieces is None:
                follow(self._gateway, stream, sink, body=body, key=key)
            else:
                problems: list[CpuosError] = []
                with Background() as background:

                    def has_ended() -> bool:
                        return stream.ended is not None

                    def started(command_id: str) -> None:
                        background.start(feed_stdin, self._gateway, command_id, pieces, problems, has_ended)

                    follow(self._gateway, stream, sink, body=body, key=key, on_started=started)
                if problems:
                    raise problems[0]
        except BaseException as error:
            # Interrupted, cancelled, or a callback failed: nobody waits for the command any more.
            if not isinstance(error, CpuosError) and stream.ended is None:
                shielded(kill_quietly, self._gateway, stream, body, key, timeout_s=5.0)
            raise
        result = sink.result(stream.ended)  # type: ignore[arg-type]
        raise_platform_failure(result)
        return result.check() if check else result

    def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: str | float | None = None,
        stdin: Stdin | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
        max_output: str | int = "1MiB",
    ) -> Job:
        """Start and return: see `Sandbox.spawn`."""
        pieces = None if stdin is None or stdin is PIPE else stdin_pieces(stdin)
        body = encode_start(
            command, cwd=cwd, env=env, user=user, timeout=timeout, open_stdin=stdin is not None, detach=True
        )
        key = new_key()
        try:
            info = self._start(body, key)
        except BaseException as error:
            # Interrupted: it may have been started, and nobody has its id.
            if not isinstance(error, CpuosError):
                shielded(self._abandon, body, key, timeout_s=5.0)
            raise
        job = Job(
            self._gateway,
            info,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            max_output=max_output,
        )
        if pieces is not None:
            problems: list[CpuosError] = []
            feed_stdin(self._gateway, job.id, pieces, problems)
            if problems:
                raise problems[0]
        return job

    def list(self) -> list[Job]:
        """All commands of the sandbox that are on record, running and ended."""
        answer = self._gateway.call("GET", f"{self._gateway.root}/commands")
        return [Job(self._gateway, command) for command in parse_answer(CommandList, answer.body).commands]

    def get(self, command_id: str) -> Job:
        """One command by its id; `command_not_found` when the sandbox has none such."""
        job = Job(self._gateway, None, command_id=command_id)
        job.refresh()
        return job

    def _start(self, body: bytes, key: str) -> Command:
        answer = self._gateway.call(
            "POST",
            f"{self._gateway.root}/commands",
            headers={"idempotency-key": key, "content-type": "application/json"},
            content=body,
        )
        return parse_answer(Command, answer.body)

    def _abandon(self, body: bytes, key: str) -> None:
        try:
            started = self._start(body, key)
        except CpuosError:
            return
        kill_quietly(self._gateway, CommandStream(command_id=started.id))
