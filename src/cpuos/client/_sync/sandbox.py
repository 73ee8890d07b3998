# Generated from src/cpuos/client/_async/sandbox.py by scripts/gen_sync.py; edit that.
"""Sandbox: one sandbox, from its creation to its end."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cpuos.client._backend_sync import shielded
from cpuos.client._http import Ticket
from cpuos.client._parse import make_labels, make_request, parse_answer
from cpuos.client._sink import LineCallback
from cpuos.client._start import new_key
from cpuos.client._stdin import Stdin
from cpuos.client._sync.client import Client
from cpuos.client._sync.commands import Commands
from cpuos.client._sync.connection import Gateway, make_ticket
from cpuos.client._sync.files import Files
from cpuos.client._sync.job import Job
from cpuos.client._sync.network import NetworkAccess, SandboxAudit
from cpuos.client._sync.ports import Ports
from cpuos.client._sync.pty import Pty, open_pty
from cpuos.client._sync.shell import Shell
from cpuos.client.network import Network, network_values
from cpuos.client.result import Result
from cpuos.errors import CpuosError, NotFound, SandboxGone
from cpuos.types.sandbox import (
    Isolation,
    Recreated,
    SandboxCreate,
    SandboxCreated,
    SandboxList,
    SandboxState,
    SandboxUpdate,
    StartedFrom,
)
from cpuos.types.sandbox import Sandbox as SandboxInfo
from cpuos.types.snapshot import Snapshot as SnapshotInfo
from cpuos.types.snapshot import SnapshotCreate
from cpuos.types.units import parse_duration_s, parse_size_mib

if TYPE_CHECKING:
    from cpuos.client._sync.snapshot import Snapshot

__all__ = ["Sandbox"]

_JSON = {"content-type": "application/json"}
# Memory and disks of many GiB on a slow volume take their time.
MOVE_S = 660.0
# How long the clean-up of an interrupted create or body may take before the sandbox is left to its timeout.
CLEAN_UP_S = 30.0


class Sandbox:
    """An isolated, disposable Linux machine. As a context manager it is killed at the end of the block."""

    def __init__(
        self,
        client: Client | None = None,
        info: SandboxInfo | None = None,
        *,
        ticket: Ticket | None = None,
        owns: bool = False,
    ) -> None:
        if not isinstance(client, Client) or info is None:
            name = type(self).__name__
            raise TypeError(f"{name}.connect(ID) opens an existing sandbox, {name}.create() makes one; not {name}(…)")
        self._client = client
        self._owns_client = owns
        self._info = info
        self._gateway = Gateway(client.http, client.server, sandbox_id=info.id, ticket=ticket)
        self.commands = Commands(self._gateway)
        self.files = Files(self._gateway, client.server)
        self.ports = Ports(client.server, client.http, sandbox_id=info.id)
        self.network = NetworkAccess(client.server, sandbox_id=info.id)
        self.audit = SandboxAudit(client.server, sandbox_id=info.id)

    @classmethod
    def create(
        cls,
        template: str | None = None,
        *,
        snapshot: str | Snapshot | None = None,
        name: str | None = None,
        cpu: int | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        timeout: str | float | None = None,
        on_timeout: str | None = None,
        idle_timeout: str | float | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        root_checkpoint_interval: str | float | None = None,
        labels: Mapping[str, str] | None = None,
        task: str | None = None,
        network: str | Network | None = None,
        alarms: Sequence[str] | None = None,
        packs: Mapping[str, str] | None = None,
        runtime: str | None = None,
        min_isolation: str | Isolation | None = None,
        allow_emulated: bool | None = None,
        idempotency_key: str | None = None,
        client: Client | None = None,
    ) -> Sandbox:
        """A running sandbox. Values not given are the server's defaults; sizes are texts such as "2GiB" or MiB.

        It begins with a template ("python" is the default), or with a `snapshot`: then what is not given is as there.
        `timeout` is the session length: when it ends the sandbox is killed, or paused with `on_timeout="pause"`. After
        `idle_timeout` without a command, job, terminal, watch, transfer or preview connection it is paused, or killed
        with `on_idle="kill"`; the next call resumes it, unless `auto_resume=False`. Each
        `root_checkpoint_interval` its files outside of /workspace are saved for a `recreate`. `network` is what it may
        reach: "internet" (the default), "off" or a `Network`. `alarms` are rules such as "cpu=90%/10m:pause": when it
        uses so much for so long that is told in the audit, and it may be paused or killed.
        `runtime="auto"` is the strongest that works on the host;
        `min_isolation` refuses less, and a microVM that is only emulated is taken with `allow_emulated=True` alone. The
        same `idempotency_key` again gives the same sandbox. Interrupted in the middle, it kills what was being made.
        """
        values: dict[str, Any] = {
            "template": template if template is not None or snapshot is not None else "python",
            "snapshot": snapshot if snapshot is None or isinstance(snapshot, str) else snapshot.id,
            "name": name,
            "cpu": cpu,
            "memory_mib": None if memory is None else parse_size_mib(memory, name="memory"),
            "disk_mib": None if disk is None else parse_size_mib(disk, name="disk"),
            "max_processes": max_processes,
            "timeout_s": None if timeout is None else parse_duration_s(timeout, name="timeout"),
            "on_timeout": on_timeout,
            "idle_timeout_s": None if idle_timeout is None else parse_duration_s(idle_timeout, name="idle_timeout"),
            "on_idle": on_idle,
            "auto_resume": auto_resume,
            "root_checkpoint_interval_s": root_checkpoint_interval
            if root_checkpoint_interval in (None, 0)
            else parse_duration_s(root_checkpoint_interval, name="root_checkpoint_interval"),
            "labels": None if labels is None else make_labels(labels),
            "task": task,
            "network": None if network is None else network_values(network),
            "alarms": alarms,
            "packs": None if packs is None else dict(packs),
            "runtime": runtime,
            "min_isolation": min_isolation,
            "allow_emulated": allow_emulated,
        }
        values = {field: value for field, value in values.items() if value is not None}
        body = make_request(SandboxCreate, values, doing="create sandbox")
        used = client or Client()
        key = idempotency_key or new_key()
        try:
            return cls._create(used, body, key, owns=client is None)
        except BaseException as error:
            # Interrupted or cancelled: the server may have made it, or be about to. Its key finds it.
            if not isinstance(error, CpuosError):
                shielded(cls._abandon, used, body, key, timeout_s=CLEAN_UP_S)
            if client is None:
                shielded(used.close, timeout_s=1.0)
            raise

    @classmethod
    def connect(cls, ref: str, *, client: Client | None = None) -> Sandbox:
        """An existing sandbox by id, name or unique prefix of its id.

        Of one that has ended the commands and their output can be read; all else raises SandboxGone with the reason.
        """
        used = client or Client()
        try:
            answer = used.server.call("GET", _path(ref))
        except BaseException:
            if client is None:
                shielded(used.close, timeout_s=1.0)
            raise
        return cls(used, parse_answer(SandboxInfo, answer.body), owns=client is None)

    @classmethod
    def list(
        cls,
        *,
        state: str | SandboxState | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        client: Client | None = None,
    ) -> builtins.list[SandboxInfo]:
        """Records of the workspace's sandboxes, newest first: of one state or name, or with all these labels.

        Without `state` those that have not ended; "all" has the ended ones too. `connect` opens one.
        """
        used = client or Client()
        query = {
            "state": state or "live",
            "name": name,
            "label": [f"{key}:{value}" for key, value in make_labels(labels or {}).items()],
        }
        try:
            answer = used.server.call("GET", "/v1/sandboxes", query=query)
        finally:
            if client is None:
                shielded(used.close, timeout_s=1.0)
        return parse_answer(SandboxList, answer.body).sandboxes

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
        """Run a command to its end. A text is run by bash, a list as it is, in /workspace as `user`.

        Output callbacks get whole lines of text without the newline, as they come; the last one may have no end.
        After `timeout` the whole process tree is killed: status `timed_out`, with the output until then. A non-zero
        exit code is a result; `check=True` raises CommandFailed. `max_output` bytes of each stream are kept in the
        result. Without `stdin` the program reads end of file. An interrupt kills the command.
        """
        return self.commands.exec(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            check=check,
            max_output=max_output,
        )

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
        """Start a command and return while it runs. `stdin=PIPE` leaves its input open for `job.write_stdin`.

        Data given as `stdin` is sent before this returns.
        """
        return self.commands.spawn(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            max_output=max_output,
        )

    def shell(self, *, user: str | None = None, cwd: str | os.PathLike[str] = "/workspace") -> Shell:
        """A shell that keeps directory, variables and functions between runs."""
        return Shell(self.commands, self.files, user=user, cwd=os.fspath(cwd))

    def pty(
        self,
        command: str | Sequence[str] = "bash -l",
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: str | float | None = None,
    ) -> Pty:
        """A command on a terminal; close it, or use it as a context manager."""
        return open_pty(self._gateway, command, size=(cols, rows), cwd=cwd, env=env, user=user, timeout=timeout)

    def kill(self) -> None:
        """End the sandbox and all in it. Killing an ended one changes nothing."""
        answer = self._client.server.call("DELETE", _path(self.id))
        self._info = parse_answer(SandboxInfo, answer.body)
        self.close()

    def pause(self) -> None:
        """Keep its memory on disk and free memory and CPU. Pausing a paused one changes nothing; an error leaves it
        running. Calls to a paused sandbox resume it and go on, unless it was created with `auto_resume=False`."""
        self._move("pause")

    def resume(self, *, incomplete: bool = False) -> None:
        """Let a paused one go on where it was; an error leaves it paused. If something of it is gone that is
        `restore_incomplete`, or with `incomplete` it goes on without that. Where its programs cannot be taken up its
        files come back alone (`info.resumed_from` is "files"); `info.restore_incomplete` names what is gone."""
        self._move("resume?incomplete=true" if incomplete else "resume")

    def recreate(self, *, idempotency_key: str | None = None) -> Recreated | None:
        """Make it anew under its id after it was lost, from the files that were kept; its programs are gone.

        What came back, and how old it is. A running one stays as it is: None, unless it was made anew before. Streams
        and preview links of before are void. An error leaves it lost, and its files kept as they were.
        """
        answer = self._client.server.call(
            "POST",
            f"{_path(self.id)}/recreate",
            headers={"idempotency-key": idempotency_key or new_key()},
            read_timeout_s=MOVE_S,
        )
        made = parse_answer(SandboxCreated, answer.body)
        self._info = made.sandbox
        self._gateway.take_ticket(make_ticket(made.access, answer))
        return made.sandbox.recreated

    def snapshot(
        self,
        name: str | None = None,
        *,
        memory: bool = True,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """What it is now, to make others of: its files, and with `memory` its processes. It goes on itself, running or
        paused."""
        from cpuos.client._sync.snapshot import Snapshot  # that one makes sandboxes

        values = {"name": name, "memory": memory, "labels": None if labels is None else make_labels(labels)}
        values = {field: value for field, value in values.items() if value is not None}
        body = make_request(SnapshotCreate, values, doing="make a snapshot")
        answer = self._client.server.call(
            "POST",
            f"{_path(self.id)}/snapshots",
            headers={"idempotency-key": idempotency_key or new_key()},
            content=body,
            read_timeout_s=MOVE_S,
        )
        return Snapshot(self._client, parse_answer(SnapshotInfo, answer.body))

    def fork(
        self,
        count: int = 1,
        *,
        timeout: str | float | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> builtins.list[Sandbox]:
        """So many running copies of it as it is now: all of them, or an error and none. It goes on itself."""
        from cpuos.client._sync.forks import fork  # that one makes sandboxes

        path = f"{_path(self.id)}/fork"
        return fork(self._client, path, count, timeout=timeout, labels=labels, key=idempotency_key)

    def close(self) -> None:
        """End this object's connections; the sandbox lives on until its timeout, or until someone kills it."""
        if self._owns_client:
            self._client.close()

    def refresh(self) -> SandboxInfo:
        """Read the record anew."""
        self._info = parse_answer(SandboxInfo, (self._client.server.call("GET", _path(self.id))).body)
        return self._info

    def set_timeout(self, timeout: str | float) -> None:
        """New session length, counted from now."""
        self._update(timeout_s=parse_duration_s(timeout, name="timeout"))

    def set_labels(self, labels: Mapping[str, str]) -> None:
        """Replace the labels."""
        self._update(labels=make_labels(labels))

    def attach_packs(self, packs: Mapping[str, str]) -> None:
        """Demand data packs (path to name). Refused (`packs_fixed`) unless it was made with them: no runtime takes any
        into a sandbox that runs. To have its files and a pack: `create(snapshot=…, packs=…)`, of a snapshot without
        memory."""
        self._update(packs=dict(packs))

    @property
    def id(self) -> str:
        """Twenty letters and digits; its first four or more name it in the command line."""
        return self._info.id

    @property
    def name(self) -> str | None:
        """As given at its creation."""
        return self._info.name

    @property
    def state(self) -> SandboxState:
        """The state as last read; `refresh` reads it anew."""
        return self._info.state

    @property
    def isolation(self) -> Isolation | None:
        """How it is kept apart from the host: `microvm`, `gvisor`, `emulated`."""
        return self._info.isolation

    @property
    def isolation_detail(self) -> str:
        """More on the isolation, as the node tells it."""
        return self._info.isolation_detail

    @property
    def started_from(self) -> StartedFrom | None:
        """How it came to be: taken from the pool of ready ones, restored from what was saved, or begun cold."""
        return self._info.started_from

    @property
    def expires_at(self) -> datetime | None:
        """When its session ends, unless `set_timeout` changes that; None while it is paused."""
        return self._info.expires_at

    @property
    def info(self) -> SandboxInfo:
        """The whole record as last read."""
        return self._info

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            shielded(self.kill, timeout_s=CLEAN_UP_S)
        except (NotFound, SandboxGone):
            pass
        except CpuosError:
            # The error of the block says more than that of the clean-up; the sandbox's timeout still ends it.
            if error is None:
                raise
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state}>"

    def _move(self, verb: str) -> None:
        answer = self._client.server.call("POST", f"{_path(self.id)}/{verb}", read_timeout_s=MOVE_S)
        self._info = parse_answer(SandboxInfo, answer.body)

    def _update(self, **values: Any) -> None:
        body = make_request(SandboxUpdate, values, doing="update sandbox")
        answer = self._client.server.call("PATCH", _path(self.id), content=body)
        self._info = parse_answer(SandboxInfo, answer.body)

    @classmethod
    def _create(cls, client: Client, body: bytes, key: str, *, owns: bool) -> Sandbox:
        answer = client.server.call(
            "POST", "/v1/sandboxes", headers={"idempotency-key": key}, content=body, read_timeout_s=120.0
        )
        created = parse_answer(SandboxCreated, answer.body)
        return cls(client, created.sandbox, ticket=make_ticket(created.access, answer), owns=owns)

    @classmethod
    def _abandon(cls, client: Client, body: bytes, key: str) -> None:
        try:
            made = cls._create(client, body, key, owns=False)
            made.kill()
        except CpuosError:
            # Not reachable, or never made: what may exist ends by its own timeout.
            return


def _path(ref: str) -> str:
    if "/" in ref:
        what = f"cannot find sandbox {ref!r}"
        raise NotFound(what, "no id and no name has a slash", code="sandbox_not_found", hint="cpuos ls")
    return f"/v1/sandboxes/{quote(ref, safe='')}"
