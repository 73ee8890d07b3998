"""What an agent may answer, as closed types, and its error codes as ours. Nothing else of an answer is used."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from cpuos.errors import ERRORS, AgentFailure, CpuosError
from cpuos.gateway.agent.http import agent_invalid
from cpuos.types.files import FileEvent, FileInfo

__all__ = [
    "AGENT_CODES",
    "AgentCommand",
    "AgentCommands",
    "AgentFileList",
    "AgentListener",
    "AgentProgram",
    "Continued",
    "Ended",
    "Frozen",
    "GuestFull",
    "GuestLimits",
    "Hello",
    "Started",
    "StdinTaken",
    "Thawed",
    "TreeDone",
    "own_refusal",
    "read_answer",
    "refusal",
]

MAX_MESSAGE = 1000
MAX_ENTRIES = 20_000
MAX_LISTENERS = 1000
MAX_PROGRAMS = 200
MAX_MISSING = 100
MAX_INT = (1 << 63) - 1

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
FreezeNonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
ProgramName = Annotated[str, StringConstraints(max_length=1024)]


def _shown(text: str) -> str:
    """As it may stand on a terminal: programs name themselves as they like."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


MissingThing = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_shown)]
CommandId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{16}$")]


class _AgentAnswer(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class Thawed(_AgentAnswer):
    """What a sandbox that goes on did before."""

    missing: Annotated[list[MissingThing], Field(max_length=MAX_MISSING)] = Field(default_factory=list)
    """Of what there was when it froze."""
    continued: Count = 0
    reseeded: Annotated[list[ProgramName], Field(max_length=MAX_PROGRAMS)] = Field(default_factory=list)
    failed: Annotated[list[ProgramName], Field(max_length=MAX_PROGRAMS)] = Field(default_factory=list)


class Hello(_AgentAnswer):
    contract: Annotated[int, Field(ge=1, le=1000)]
    agent: Annotated[str, StringConstraints(max_length=64)]
    sandbox: Annotated[str, StringConstraints(max_length=64)]
    generation: Count
    incarnation: Count = 0
    boot_s: Annotated[float, Field(ge=0)] = 0.0
    commands: Count = 0
    frozen: FreezeNonce | None = None
    thawed: Thawed | None = None


class AgentListener(_AgentAnswer):
    port: Annotated[int, Field(ge=1, le=65535)]
    address: Annotated[str, StringConstraints(pattern=r"^[0-9a-f.:]{1,45}$")]


class AgentProgram(_AgentAnswer):
    pid: Annotated[int, Field(ge=1, le=1 << 31)]
    name: Annotated[str, StringConstraints(max_length=64)]


class Frozen(_AgentAnswer):
    """What stands still since a freeze."""

    processes: Count
    programs: Annotated[list[AgentProgram], Field(max_length=MAX_LISTENERS)] = Field(default_factory=list)
    """Of very many not all."""
    listeners: Annotated[list[AgentListener], Field(max_length=MAX_LISTENERS)] = Field(default_factory=list)
    commands: Annotated[list[CommandId], Field(max_length=MAX_ENTRIES)] = Field(default_factory=list)


class Continued(_AgentAnswer):
    continued: Count


class Started(_AgentAnswer):
    pid: Annotated[int, Field(ge=1, le=1 << 31)]
    stdin: Count | None = None
    """Bytes of stdin taken so far; None: the agent does not tell."""


class StdinTaken(_AgentAnswer):
    stdin: Count


class Ended(_AgentAnswer):
    """The end of a command: an exit code only with `exited`, a signal only where one ended it."""

    status: Literal["exited", "signalled", "timed_out", "killed", "limited"]
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    signal: Annotated[int, Field(ge=1, le=64)] | None = None
    limit: Annotated[str, StringConstraints(max_length=64)] | None = None
    met: Literal["memory", "processes"] | None = None
    """The limit that programs of it met by the count of the guest's own kernel."""
    reason: Annotated[str, StringConstraints(max_length=MAX_MESSAGE)] = ""
    duration_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    stdout_bytes: Count = 0
    stderr_bytes: Count = 0
    output_path: Annotated[str, StringConstraints(max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Ended:
        if (self.exit_code is not None) != (self.status == "exited"):
            raise ValueError("an exit code comes with status exited, and only with it")
        if self.signal is not None and self.status in ("exited", "limited"):
            raise ValueError("a signal does not go with that status")
        if self.signal is None and self.status == "signalled":
            raise ValueError("status signalled names a signal")
        if (self.limit is not None) != (self.status == "limited"):
            raise ValueError("a limit comes with status limited, and only with it")
        return self


class GuestFull(_AgentAnswer):
    """A limit that is used up, as the guest's own kernel has it."""

    limit: Literal["disk", "inodes", "processes"]
    path: Literal["/workspace", "/"] | None = None
    value: Count


class GuestLimits(_AgentAnswer):
    full: Annotated[list[GuestFull], Field(max_length=16)]


class AgentCommand(_AgentAnswer):
    id: CommandId
    status: Annotated[str, StringConstraints(max_length=32)]


class AgentCommands(_AgentAnswer):
    commands: Annotated[list[AgentCommand], Field(max_length=MAX_ENTRIES)]


class AgentFileList(_AgentAnswer):
    model_config = ConfigDict(strict=False)

    entries: Annotated[list[FileInfo], Field(max_length=MAX_ENTRIES)]
    truncated: bool = False


class TreeDone(_AgentAnswer):
    files: Count
    bytes: Count


class _Refusal(_AgentAnswer):
    code: Annotated[str, StringConstraints(max_length=64)]
    message: Annotated[str, StringConstraints(max_length=64 << 10)] = ""
    missing: Annotated[list[MissingThing], Field(max_length=MAX_MISSING)] = Field(default_factory=list)


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    cls: TypeAdapter(cls)
    for cls in (
        Hello,
        Started,
        StdinTaken,
        Ended,
        AgentCommands,
        AgentFileList,
        TreeDone,
        Frozen,
        Continued,
        GuestLimits,
        FileInfo,
        FileEvent,
        _Refusal,
    )
}


def read_answer(cls: type[Any], data: bytes | bytearray | memoryview) -> Any:
    """The answer as its type; what does not fit is `agent_invalid`."""
    try:
        return _ADAPTERS[cls].validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:64]
        raise agent_invalid(f"{cls.__name__.strip('_')} {where}: {first['msg'][:120]}") from None


# The agent's codes that have another name here; the rest of its codes are ours too.
AGENT_CODES = {
    "identity_required": "agent_invalid",
    "identity_refused": "agent_invalid",
    "not_found": "agent_invalid",
    "internal": "agent_invalid",
    "invalid": "invalid_request",
    "cwd_not_found": "file_not_found",
    "command_not_found": "command_not_found",
    "user_not_found": "user_not_found",
    "file_not_found": "file_not_found",
    "file_exists": "file_exists",
    "is_a_directory": "is_a_directory",
    "not_a_directory": "not_a_directory",
    "directory_not_empty": "directory_not_empty",
    "file_permission_denied": "file_permission_denied",
    "file_name_invalid": "file_name_invalid",
    "file_kind_unsupported": "file_kind_unsupported",
    "disk_full": "disk_full",
    "upload_incomplete": "upload_incomplete",
    "limit_reached": "limit_reached",
    "port_not_open": "port_not_open",
    "port_forbidden": "forbidden",
    "frozen": "sandbox_paused",
    "freeze_failed": "freeze_failed",
    "restore_incomplete": "restore_incomplete",
}


def refusal(body: bytes, *, what: str) -> CpuosError:
    """An agent's error answer as ours; the agent's own code stays in `details["agent_code"]`."""
    told = read_answer(_Refusal, body)
    code = AGENT_CODES.get(told.code)
    if code is None and told.code not in ("program_not_found", "program_not_executable"):
        return agent_invalid(f"its error code is not one of the contract: {json.dumps(told.code)}")
    code = code or "file_not_found"
    details: dict[str, Any] = {"agent_code": told.code}
    if told.missing:
        details["missing"] = told.missing
    return ERRORS[code][0](what, told.message[:MAX_MESSAGE], code=code, details=details)


def own_refusal(body: bytes, *, what: str, known: str) -> CpuosError:
    """As `refusal`, of a call by which the platform holds the sandbox. But for `known` it is the agent's own fault,
    whatever it calls itself: as trouble of the platform's, which is waited for, it would put off its end for ever."""
    error = refusal(body, what=what)
    if error.code == known or isinstance(error, AgentFailure):
        return error
    code = json.dumps(error.details["agent_code"])
    why = f"it refused with {code}, which does not go with the call"
    return AgentFailure(what, why, code="agent_invalid", details=error.details)
