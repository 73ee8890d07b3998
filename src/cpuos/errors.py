"""The exception tree, and the one table that ties a code to its class and HTTP status.

An error crosses the wire as its code with three texts: what could not be done, why, and what to try. The other side
looks the code up here; nothing named by a peer is ever imported or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "ERRORS",
    "AgentFailure",
    "AuthenticationError",
    "CapacityExceeded",
    "CommandFailed",
    "Conflict",
    "CpuosError",
    "FileConflict",
    "FileProblem",
    "Forbidden",
    "InvalidRequest",
    "LimitReached",
    "NotFound",
    "OutputLost",
    "PermissionDenied",
    "PlatformError",
    "PortProblem",
    "SandboxGone",
    "SetupRequired",
    "Unavailable",
    "error_from_body",
    "is_error_body",
]


class CpuosError(Exception):
    """Base of everything cpuOS raises: `what` could not be done, `why`, and a pasteable next step in `hint`."""

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        what: str,
        why: str = "",
        *,
        code: str | None = None,
        hint: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})
        if code is not None:
            self.code = code  # type: ignore[misc]

    @property
    def status(self) -> int:
        """HTTP status of this code."""
        return ERRORS[self.code][1]

    def __str__(self) -> str:
        what, why, hint = self.lines()
        return f"{what}\n{why}\ntry: {hint}"

    def lines(self) -> tuple[str, str, str]:
        """What, why and try; never an empty one: the code has words for what was not said."""
        why, hint = _WORDS.get(self.code, _WORDS["internal"])
        return self.what, self.why or why, self.hint or hint

    def body(self) -> dict[str, Any]:
        """The error as it crosses the wire."""
        what, why, hint = self.lines()
        return {"error": {"code": self.code, "what": what, "why": why, "try": hint, "details": self.details}}


class InvalidRequest(CpuosError):
    """The request itself is wrong: a value, a name, a missing field."""

    code = "invalid_request"


class AuthenticationError(CpuosError):
    """No key, a wrong key, or a stale ticket."""

    code = "key_invalid"


class Forbidden(CpuosError):
    """The key is good, the action is not granted to it."""

    code = "forbidden"


class NotFound(CpuosError):
    """The thing named does not exist, or its existence is not yours to know."""

    code = "not_found"


class Conflict(CpuosError):
    """The thing is in another state, generation or ownership than the call needs."""

    code = "wrong_state"


class LimitReached(CpuosError):
    """A limit of this sandbox or request was reached; the text names it."""

    code = "limit_reached"


class CapacityExceeded(LimitReached):
    """The node has no room now; nothing was created."""

    code = "capacity_exceeded"


class FileProblem(CpuosError):
    """A file call failed inside the sandbox for a reason of its file system."""

    code = "file_not_found"


class FileConflict(FileProblem):
    """Something of another kind, or already there."""

    code = "file_exists"


class PermissionDenied(FileProblem):
    """The sandbox user may not do this to that path."""

    code = "file_permission_denied"


class PortProblem(CpuosError):
    """Nothing inside the sandbox listens on the port, or what listens there gave no valid answer."""

    code = "port_not_open"


class PlatformError(CpuosError):
    """cpuOS itself failed; never the command's own failure."""


class Unavailable(PlatformError):
    """A part is down or cannot be reached."""

    code = "server_unavailable"


class SetupRequired(PlatformError):
    """Something is not installed, of another version, or needs root."""

    code = "setup_required"


class SandboxGone(PlatformError):
    """The sandbox died or was killed while the call needed it."""

    code = "sandbox_lost"


class AgentFailure(PlatformError):
    """The agent inside the sandbox gave no valid answer (it is never trusted)."""

    code = "agent_invalid"


class OutputLost(PlatformError):
    """Recorded output is no longer held, or a stream was cut and could not be resumed."""

    code = "output_lost"


class CommandFailed(CpuosError):
    """Raised only by `check=True`; carries the result."""

    code = "command_failed"

    def __init__(self, what: str, why: str = "", *, result: Any = None, **rest: Any) -> None:
        super().__init__(what, why, **rest)
        self.result = result


# code: (class, HTTP status, meaning). The reference page is generated from this table; a test provokes each code.
ERRORS: dict[str, tuple[type[CpuosError], int, str]] = {
    "internal": (PlatformError, 500, "A fault of cpuOS; the log has the details under the request id."),
    "invalid_request": (
        InvalidRequest,
        422,
        "A value in the request is not acceptable; the text names field and value.",
    ),
    "key_missing": (AuthenticationError, 401, "No API key or ticket was sent."),
    "key_invalid": (AuthenticationError, 401, "The API key is not known."),
    "ticket_invalid": (
        AuthenticationError,
        401,
        "The ticket was not signed by this installation or names another sandbox.",
    ),
    "ticket_expired": (AuthenticationError, 401, "The ticket is stale; the SDK fetches a new one by itself."),
    "link_expired": (AuthenticationError, 401, "The download link is past its time."),
    "forbidden": (Forbidden, 403, "The key or ticket does not grant this action."),
    "not_found": (NotFound, 404, "No such route or thing."),
    "sandbox_not_found": (NotFound, 404, "No sandbox of this workspace has that id, name or prefix."),
    "template_not_found": (NotFound, 404, "The template is not installed on any node."),
    "template_in_use": (Conflict, 409, "Live sandboxes were started from the template."),
    "pack_not_found": (NotFound, 404, "No data pack of this workspace has that name."),
    "pack_in_use": (Conflict, 409, "Sandboxes or snapshots have the data pack."),
    "packs_fixed": (Conflict, 409, "A sandbox has the data packs that it was made with; none can be attached later."),
    "pack_failed": (InvalidRequest, 422, "The data pack could not be made of the folder; the text says why."),
    "build_not_found": (NotFound, 404, "No template build of this workspace has that id."),
    "build_failed": (InvalidRequest, 422, "A step of the template's build failed; the text names it and its output."),
    "start_not_ready": (PlatformError, 502, "What the template starts was not ready in time; the sandbox was ended."),
    "command_not_found": (NotFound, 404, "The sandbox has no command with that id."),
    "snapshot_not_found": (NotFound, 404, "No snapshot of this workspace has that id or name."),
    "snapshot_in_use": (Conflict, 409, "A sandbox is being created from the snapshot."),
    "snapshot_incompatible": (
        Conflict,
        409,
        "The snapshot was made with another version of the runtime or template, or for other sizes.",
    ),
    "snapshot_damaged": (
        PlatformError,
        500,
        "What is kept of the snapshot or paused sandbox is not what was saved; nothing was started from it.",
    ),
    "restore_incomplete": (
        Conflict,
        409,
        "Not all that a paused sandbox had came back; it stays paused, and `details.missing` names what is gone.",
    ),
    "sandbox_paused": (Unavailable, 503, "The sandbox is paused; it goes on when it is resumed."),
    "volume_full": (
        Unavailable,
        503,
        "Something else has filled the node's data volume: its sandboxes stand still until there is room.",
    ),
    "sandbox_busy": (Conflict, 409, "Something runs or is open in the sandbox, so it was not paused as an idle one."),
    "freeze_failed": (
        Conflict,
        409,
        "The processes of the sandbox could not be stopped for a pause or snapshot; they go on.",
    ),
    "name_ambiguous": (Conflict, 409, "More than one sandbox matches the prefix."),
    "name_taken": (Conflict, 409, "Another live sandbox of this workspace has that name."),
    "wrong_state": (Conflict, 409, "The sandbox is not in a state that allows the call."),
    "stale_generation": (Conflict, 409, "The call was made for an earlier generation of the sandbox."),
    "sandbox_not_ready": (Conflict, 409, "The sandbox that was started ahead for this create is there no more."),
    "stale_policy": (Conflict, 409, "A later version of the sandbox's network policy is in force on its node."),
    "network_block_taken": (Conflict, 409, "The addresses for sandboxes clash with some that the host needs."),
    "idempotency_mismatch": (Conflict, 409, "The idempotency key was used with another path or body."),
    "idempotency_in_progress": (Conflict, 409, "The first call with this idempotency key has not ended."),
    "body_too_large": (LimitReached, 413, "The request body is over the limit that the text names."),
    "limit_reached": (LimitReached, 429, "A limit of the sandbox was reached; the text names it."),
    "capacity_exceeded": (CapacityExceeded, 429, "No node has room; the text names what is short."),
    "user_not_found": (FileProblem, 422, "The sandbox has no such user."),
    "file_not_found": (FileProblem, 404, "No such file or directory in the sandbox."),
    "file_exists": (FileConflict, 409, "The destination already exists."),
    "is_a_directory": (FileConflict, 409, "A file is needed and the path is a directory."),
    "not_a_directory": (
        FileConflict,
        409,
        "A directory is needed and the path, or a part of it, is not one.",
    ),
    "directory_not_empty": (FileConflict, 409, "The directory has entries; remove it recursively."),
    "file_permission_denied": (PermissionDenied, 403, "The sandbox user may not do this to that path."),
    "file_name_invalid": (
        FileProblem,
        422,
        "The file system does not take this name: too long, or with a zero byte.",
    ),
    "file_kind_unsupported": (
        FileProblem,
        409,
        "The path is a device, socket or pipe; only files, directories and links are served.",
    ),
    "disk_full": (LimitReached, 507, "The sandbox's disk has no room; nothing of the file was kept."),
    "upload_incomplete": (
        FileProblem,
        400,
        "The body ended before its announced length; nothing of the file was kept.",
    ),
    "unsafe_path": (
        FileProblem,
        409,
        "An entry would leave the target folder or collide; nothing outside was touched.",
    ),
    "port_not_open": (PortProblem, 502, "Nothing inside the sandbox listens on that port."),
    "port_answer_invalid": (PortProblem, 502, "What listens on that port gave no valid HTTP answer, or none in time."),
    "request_malformed": (
        InvalidRequest,
        400,
        "The request to a preview is not valid HTTP/1.1, or its Host names no preview.",
    ),
    "sandbox_lost": (SandboxGone, 410, "The sandbox died; its record says when and why."),
    "sandbox_stopped": (SandboxGone, 410, "The sandbox was killed or its time ended."),
    "agent_unresponsive": (AgentFailure, 504, "The agent inside the sandbox did not answer in time."),
    "agent_invalid": (AgentFailure, 502, "The agent inside the sandbox answered outside its contract."),
    "end_unknown": (PlatformError, 502, "Nobody saw how the command ended; the text says what is known of it."),
    "output_lost": (OutputLost, 410, "Recorded output at that offset is no longer held."),
    "stream_cut": (OutputLost, 502, "The stream ended early and could not be resumed at its offset."),
    "server_unavailable": (Unavailable, 503, "The cpuOS server cannot be reached."),
    "gateway_unavailable": (Unavailable, 503, "The gateway of the sandbox's node cannot be reached."),
    "node_unavailable": (Unavailable, 503, "The node daemon cannot be reached or refused the work."),
    "runtime_unavailable": (SetupRequired, 503, "The node has no runtime that the request accepts."),
    "runtime_version": (SetupRequired, 503, "The runtime's program is not of the pinned version."),
    "setup_required": (SetupRequired, 503, "Something cpuOS needs is not installed."),
    "needs_root": (SetupRequired, 403, "The action needs root on the node."),
    "command_failed": (
        CommandFailed,
        409,
        "A command ended otherwise than with exit code 0 and check was asked.",
    ),
}


# Code: the why and the step to try of an error that was raised without its own.
_WORDS: dict[str, tuple[str, str]] = {
    "internal": ("a part of cpuOS did what it must not", "cpuos status; cpuos doctor"),
    "invalid_request": (
        "a value in it is not one that is taken",
        "GET /v1/openapi.json lists every field",
    ),
    "key_missing": ("the call carries no key or ticket", "export CPUOS_API_KEY=…, or cpuos up"),
    "key_invalid": (
        "the installation has no such key",
        "check CPUOS_API_KEY and ~/.config/cpuos/credentials.json; cpuos up writes a key",
    ),
    "ticket_invalid": (
        "the gateway takes only tickets that this installation's server made for this sandbox",
        "POST /v1/sandboxes/SANDBOX/access of the server gives a ticket",
    ),
    "ticket_expired": (
        "a ticket lives a few minutes",
        "POST /v1/sandboxes/SANDBOX/access of the server gives a ticket",
    ),
    "link_expired": ("its time is over", "sbx.files.url(PATH) makes a new link"),
    "forbidden": ("the key or ticket does not grant it", "use a key that has the permission"),
    "not_found": ("nothing here has that name", "GET /v1/openapi.json lists the routes"),
    "sandbox_not_found": ("no sandbox of this workspace has that id, name or prefix", "cpuos ls --all"),
    "template_not_found": ("no node has it", "cpuos template ls"),
    "template_in_use": ("sandboxes that live run from its image", "cpuos ls, then cpuos kill SANDBOX"),
    "pack_not_found": ("there is none of that name", "cpuos pack ls"),
    "pack_in_use": ("sandboxes or snapshots have it", "cpuos ls, cpuos snapshots ls; it can go when they are gone"),
    "packs_fixed": ("its runtime takes none into a sandbox that runs", "cpuos create --pack PATH=NAME"),
    "pack_failed": ("the folder cannot be packed", "look at the folder in the sandbox"),
    "build_not_found": ("no template build of this workspace has that id", "cpuos template ls"),
    "build_failed": ("a step of the build failed", "cpuos template build --help"),
    "start_not_ready": ("what the template starts did not begin to listen", "cpuos template inspect NAME"),
    "command_not_found": ("the sandbox has no command with that id", "cpuos ps --all SANDBOX"),
    "snapshot_not_found": ("no snapshot of this workspace has that id or name", "cpuos snapshots ls"),
    "snapshot_in_use": ("a sandbox is being created from it", "repeat the call when that has ended"),
    "snapshot_incompatible": (
        "its memory fits only what it was made with",
        "create from it with warm=False: its files are taken, its processes are not",
    ),
    "snapshot_damaged": (
        "what is kept is not what was saved",
        "the node's log names the part; create from another snapshot",
    ),
    "sandbox_paused": ("it is paused", "cpuos resume SANDBOX"),
    "volume_full": ("the node's data volume is full", "cpuos df, then free some room on the node"),
    "sandbox_busy": (
        "a command, terminal, transfer, watch or preview is open",
        "cpuos pause SANDBOX pauses it all the same",
    ),
    "restore_incomplete": (
        "not all that it had when it was paused is there",
        "cpuos resume SANDBOX once more; or without what is missing: cpuos resume --incomplete SANDBOX",
    ),
    "freeze_failed": ("not all of its processes would stop", "repeat the call; cpuos ps SANDBOX shows what runs"),
    "name_ambiguous": ("more than one sandbox matches", "use more letters of the id; cpuos ls --all"),
    "name_taken": ("another live sandbox has that name", "use another name, or cpuos kill SANDBOX"),
    "wrong_state": ("the sandbox's state does not allow it", "cpuos ls --all shows the state"),
    "stale_generation": ("the sandbox was made anew since", "cpuos ls, then connect to the sandbox anew"),
    "sandbox_not_ready": ("it was given up, or has died", "repeat the call: another one is made"),
    "stale_policy": ("it was changed meanwhile", "cpuos net SANDBOX shows what holds"),
    "network_block_taken": (
        "the host needs these addresses itself",
        'set network_block to "auto", or to a network that this host does not use; cpuos doctor',
    ),
    "idempotency_mismatch": ("a key stands for one body", "send a new Idempotency-Key for a new request"),
    "idempotency_in_progress": ("the first call has not ended", "repeat the call later with the same key"),
    "body_too_large": ("a body of this call has a limit", "pass large data by sbx.files.write or sbx.files.upload"),
    "limit_reached": (
        "the sandbox has as many as it may",
        "wait for one to end, or end one: cpuos ps SANDBOX, then cpuos kill SANDBOX COMMAND",
    ),
    "capacity_exceeded": ("no node has room", "GET /v1/capacity; cpuos ls, then cpuos kill SANDBOX"),
    "user_not_found": ("the sandbox has no such user", "cpuos exec SANDBOX cut -d: -f1 /etc/passwd"),
    "file_not_found": (
        "the sandbox has no such file or folder",
        'cpuos exec SANDBOX ls -la /workspace, or sbx.files.list("/workspace")',
    ),
    "file_exists": ("something has that name", "write to another path, or remove it: sbx.files.remove(PATH)"),
    "is_a_directory": ("a file is needed here", "sbx.files.list(PATH) shows what it holds"),
    "not_a_directory": ("a folder is needed here", "sbx.files.stat(PATH) tells what it is"),
    "directory_not_empty": ("it has entries", "sbx.files.remove(PATH, recursive=True)"),
    "file_permission_denied": (
        "the sandbox's user may not do it there",
        'the same call with user="root", or a path below /workspace',
    ),
    "file_name_invalid": ("the file system does not take the name", "a shorter name, without a zero byte"),
    "file_kind_unsupported": ("only files, folders and links are served", "copy its content to a file with sbx.exec"),
    "disk_full": (
        "the sandbox's disk has no room",
        "cpuos exec SANDBOX df -h /workspace; remove files, or create one with more disk",
    ),
    "upload_incomplete": ("less came than was announced", "repeat the call"),
    "unsafe_path": (
        "an entry would leave the folder or collide",
        "use an empty folder, and names that differ in more than their case",
    ),
    "port_not_open": (
        "nothing inside listens there, on 127.0.0.1 or ::1",
        "start the server in the sandbox, such as: cpuos exec SANDBOX -- python3 -m http.server 3000",
    ),
    "port_answer_invalid": ("what listens there does not speak HTTP/1.1", "see what it prints: cpuos logs SANDBOX"),
    "request_malformed": ("it is not HTTP/1.1 as a preview takes it", "sbx.ports.url(3000), or cpuos ports SANDBOX"),
    "sandbox_lost": ("it died", "cpuos recreate SANDBOX; cpuos audit --sandbox SANDBOX tells when"),
    "sandbox_stopped": ("it was killed or its time ended", "cpuos create; cpuos ps --all SANDBOX shows what ran in it"),
    "agent_unresponsive": (
        "the agent in the sandbox gave no answer in time",
        "repeat the call; where it stays so: cpuos kill SANDBOX, then cpuos create",
    ),
    "agent_invalid": (
        "the agent in the sandbox answered outside its contract",
        "cpuos kill SANDBOX, then cpuos create",
    ),
    "output_lost": (
        "its record is no longer held",
        "cpuos ps --all SANDBOX shows what is; write large output to a file",
    ),
    "end_unknown": ("no end was recorded", "cpuos logs SANDBOX COMMAND"),
    "stream_cut": ("it could not be resumed", "job.wait(), or cpuos logs SANDBOX COMMAND"),
    "server_unavailable": ("it does not answer", "cpuos status; cpuos up"),
    "gateway_unavailable": ("it does not answer", "cpuos status; cpuos up"),
    "node_unavailable": ("it does not answer", "cpuos status; cpuos up"),
    "runtime_unavailable": ("no node has a runtime for it", "cpuos doctor"),
    "runtime_version": ("the runtime is not of the pinned version", "cpuos up"),
    "setup_required": ("something that cpuOS needs is not installed", "cpuos doctor"),
    "needs_root": ("only root may do it", "sudo cpuos up"),
    "command_failed": ("it did not end with exit code 0", "without check=True the result is returned, with its output"),
}


def is_error_body(body: Any) -> bool:
    """Whether a peer's answer says what went wrong. One of its web server alone does not: the peer has stopped while it
    worked on the call."""
    return isinstance(body, dict) and isinstance(body.get("error"), dict)


def error_from_body(body: Any, *, status: int = 500) -> CpuosError:
    """Rebuild the exception that a peer sent; an unknown code becomes PlatformError with the peer's text."""
    if not is_error_body(body):
        return PlatformError(f"cannot read the answer: HTTP {status} without an error body", code="internal")
    error = body["error"]
    code = str(error.get("code", ""))
    cls = ERRORS[code][0] if code in ERRORS else PlatformError
    details = error.get("details")
    return cls(
        str(error.get("what", "")) or f"the call failed with HTTP {status}",
        str(error.get("why", "")),
        code=code if code in ERRORS else "internal",
        hint=str(error.get("try", "")),
        details=details if isinstance(details, dict) else None,
    )
