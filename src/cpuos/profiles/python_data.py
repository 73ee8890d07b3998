"""python-data: one script over data files in a fresh sandbox; computed values, script and charts as evidence.

The script runs as `python NAME.py INPUT…` in /workspace, where the inputs lie under their own names. What it writes
below `out/` (also in the variable CPUOS_OUT) comes back. Its values are the JSON object in `out/values.json`, else the
last line of its stdout where that is a JSON object; a script without either has none, and the evidence says so.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cpuos import Result, Sandbox
from cpuos.errors import CpuosError, InvalidRequest, LimitReached
from cpuos.profiles.catalog import Profile
from cpuos.profiles.evidence import (
    CommandEvidence,
    Evidence,
    EvidenceStatus,
    FileEvidence,
    GuestEvidence,
    HostEvidence,
    SandboxEvidence,
    describe_artifacts,
    describe_file,
    evidence_folder,
    read_values,
)
from cpuos.types.command import Command

__all__ = ["run"]

_WORKSPACE = "/workspace"
_OUT = f"{_WORKSPACE}/out"
_SHOWN_NAMES = 3


class _Values(NamedTuple):
    values: dict[str, Any] | None
    source: Literal["out/values.json", "stdout", "none"]
    notes: list[str]


def run(
    profile: Profile,
    *,
    inputs: Sequence[Path],
    script: Path,
    out: Path,
    template: str | None = None,
    runtime: str | None = None,
    allow_emulated: bool | None = None,
    cpu: int | None = None,
    memory: str | int | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Evidence:
    """Run the script and write the evidence folder; a failed script is evidence too, with status `failed`.

    What fails before the script starts (a missing input, no room for a sandbox) raises, and nothing is written.
    """
    described = _describe_inputs(inputs, script)
    timeout_s = profile.limits.timeout_s if timeout_s is None else timeout_s
    template = profile.template if template is None else template
    with evidence_folder(out, tell=on_progress) as folder:
        on_progress(f"creating a sandbox from {template}")
        sandbox = Sandbox.create(
            template,
            cpu=profile.limits.cpu if cpu is None else cpu,
            memory=profile.limits.memory_mib if memory is None else memory,
            disk=profile.limits.disk_mib,
            runtime=runtime,
            allow_emulated=allow_emulated,
            # Room for the way there and back; the script's own limit is the command's timeout.
            timeout=timeout_s + 600,
            labels={"profile": profile.name},
        )
        with sandbox:
            names = " and ".join([*(path.name for path in inputs), script.name])
            on_progress(f"{sandbox.id}: {sandbox.isolation}, uploading {names}")
            for path in (*inputs, script):
                sandbox.files.upload(path, f"{_WORKSPACE}/{path.name}")
            sandbox.files.mkdir(_OUT)
            on_progress(f"running python {script.name}")
            argv = _argv(script, inputs)
            evidence = _run_script(profile, sandbox, described, argv=argv, folder=folder, timeout_s=timeout_s)
        (folder / "script").mkdir()
        shutil.copyfile(script, folder / "script" / script.name)
        (folder / "evidence.json").write_text(evidence.model_dump_json(indent=2) + "\n")
    return evidence


def _describe_inputs(inputs: Sequence[Path], script: Path) -> tuple[list[FileEvidence], FileEvidence]:
    seen = {"out"}
    for path in (*inputs, script):
        if not path.is_file():
            why = "it is a folder; one file is needed here" if path.is_dir() else "there is no such file"
            place = shlex.quote(str(path if path.is_dir() else path.parent))
            raise InvalidRequest(f"cannot read file: {path}", why, hint=f"ls -l {place}")
        if path.name in seen:
            raise InvalidRequest(
                f"cannot upload file: {path}",
                f"inputs and script lie side by side in {_WORKSPACE}, where {path.name!r} is taken",
                hint=shlex.join(["cp", str(path), str(path.with_name(f"other-{path.name}"))]),
            )
        seen.add(path.name)
    return [describe_file(path) for path in inputs], describe_file(script)


def _argv(script: Path, inputs: Sequence[Path]) -> list[str]:
    # "./" keeps names such as "-c.py" from being read as options.
    return ["python", f"./{script.name}", *(f"./{path.name}" for path in inputs)]


def _run_script(
    profile: Profile,
    sandbox: Sandbox,
    described: tuple[list[FileEvidence], FileEvidence],
    *,
    argv: list[str],
    folder: Path,
    timeout_s: float,
) -> Evidence:
    """Run and collect. From here on what goes wrong in cpuOS or in the sandbox is evidence, not an exception."""
    environment = {"CPUOS_OUT": _OUT, "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    inputs, script = described
    reason = ""
    notes: list[str] = []
    result = None
    record = None
    try:
        result = sandbox.exec(argv, cwd=_WORKSPACE, env=environment, timeout=timeout_s)
        reason = "" if result.ok else _why_failed(result, memory_mib=sandbox.info.memory_mib)
        (folder / "stdout.txt").write_bytes(result.stdout_raw)
        (folder / "stderr.txt").write_bytes(result.stderr_raw)
        record = sandbox.commands.get(result.command_id).info
        _download_artifacts(profile, sandbox, folder / "artifacts")
        notes = _lying_beside(sandbox, {described.name for described in (*inputs, script)})
    except CpuosError as error:
        reason = reason or f"{error.what}: {error.why}"
    (folder / "artifacts").mkdir(exist_ok=True)
    values = _collect_values(profile, folder / "artifacts", result.stdout if result else "")
    return Evidence(
        profile=profile.name,
        status=EvidenceStatus.FAILED if reason else EvidenceStatus.SUCCEEDED,
        reason=reason,
        notes=[*notes, *values.notes],
        host=HostEvidence(
            sandbox=_describe_sandbox(sandbox),
            inputs=inputs,
            script=script,
            command=_describe_command(record),
            artifacts=describe_artifacts(folder / "artifacts"),
        ),
        guest=GuestEvidence(
            exit_code=result.exit_code if result else None,
            signal=result.signal if result else None,
            values=values.values,
            values_from=values.source,
        ),
    )


def _why_failed(result: Result, *, memory_mib: int) -> str:
    if result.status == "exited":
        return f"the script ended with exit code {result.exit_code}"
    if result.status == "timed_out":
        return f"the script ran over its time and was killed after {result.duration_s:.0f} s"
    if result.status == "oom_killed":
        return f"the script ran out of the sandbox's memory of {memory_mib} MiB after {result.duration_s:.0f} s"
    return f"the script ended as {result.status}" + (f": {result.reason}" if result.reason else "")


def _download_artifacts(profile: Profile, sandbox: Sandbox, target: Path) -> None:
    """What lies below out/, after a look at its announced size; the download itself trusts no name and no link."""
    limits = profile.limits
    entries = [entry for entry in sandbox.files.list(_OUT, depth=32) if entry.kind == "file"]
    size = sum(entry.size for entry in entries)
    if len(entries) > limits.artifact_files or size > limits.artifact_bytes:
        raise LimitReached(
            f"cannot download artifacts: {len(entries)} files of {size} bytes",
            f"the profile returns at most {limits.artifact_files} files and {limits.artifact_bytes} bytes",
            hint="write fewer or smaller files below out/",
        )
    sandbox.files.download(_OUT, target)


def _lying_beside(sandbox: Sandbox, ours: set[str]) -> list[str]:
    """What the script wrote beside out/ does not come back: most often by mistake."""
    entries = [entry for entry in sandbox.files.list(_WORKSPACE) if entry.kind == "file"]
    names = [name for entry in entries if (name := entry.path.rpartition("/")[2]) not in ours]
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN_NAMES]) + (" and more" if len(names) > _SHOWN_NAMES else "")
    return [f"not brought back: {shown}, for only what lies below out/ is: write out/{names[0]}"]


def _collect_values(profile: Profile, artifacts: Path, stdout: str) -> _Values:
    limit = profile.limits.values_bytes
    path = artifacts / "values.json"
    if path.is_file() and not path.is_symlink():
        try:
            if path.stat().st_size > limit:
                raise ValueError(f"it is over {limit} bytes")
            return _Values(read_values(path.read_text(), limit=limit), "out/values.json", [])
        except ValueError as error:
            return _Values(None, "none", [f"no values: out/values.json cannot be read: {error}"])
    lines = stdout.rstrip().splitlines()
    if lines and lines[-1].lstrip().startswith("{"):
        try:
            return _Values(read_values(lines[-1], limit=limit), "stdout", [])
        except ValueError as error:
            return _Values(None, "none", [f"no values: the last line of stdout cannot be read: {error}"])
    note = "no values: the script wrote no out/values.json and its last line of stdout is no JSON object"
    return _Values(None, "none", [note])


def _describe_sandbox(sandbox: Sandbox) -> SandboxEvidence:
    info = sandbox.info
    return SandboxEvidence(
        id=info.id,
        template=info.template,
        template_digest=info.template_digest,
        runtime=info.runtime,
        isolation=info.isolation or "none",
        isolation_detail=info.isolation_detail,
        memory_mib=info.memory_mib,
    )


def _describe_command(record: Command | None) -> CommandEvidence | None:
    if record is None:
        return None
    fields = CommandEvidence.model_fields.keys()
    return CommandEvidence(**{name: getattr(record, name) for name in fields})
