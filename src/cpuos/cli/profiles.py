"""profile run, profile ls."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.results import exit_code_of
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos.profiles.evidence import Evidence

__all__ = ["list_profiles", "register", "run_profile"]

_SHOWN_LINES = 10
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([A-Za-z0-9_.]{1,64})'$", re.MULTILINE)


def register(app: typer.Typer) -> None:
    group = command_group("Run a kind of work and get evidence of it.")
    group.command("run")(run_profile)
    group.command("ls")(list_profiles)
    app.add_typer(group, name="profile")


def run_profile(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Which profile, as in `cpuos profile ls`.", metavar="PROFILE")],
    script: Annotated[Path, typer.Option(help="The program to run.")],
    inputs: Annotated[list[Path] | None, typer.Option("--input", "-i", help="A data file; may be repeated.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Evidence folder; an earlier one is kept, renamed with its time.")
    ] = Path("evidence"),
    template: Annotated[str | None, typer.Option(help="Another template than the profile's.")] = None,
    runtime: Annotated[str | None, typer.Option(help="gvisor, microvm, or auto (default): the strongest.")] = None,
    allow_emulated: Annotated[
        bool, typer.Option("--allow-emulated", help="Take a microVM without hardware that runs it: for development.")
    ] = False,
    cpu: Annotated[int | None, typer.Option(help="CPUs (default 2).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, such as 4GiB (default 2GiB).")] = None,
    timeout: Annotated[str | None, typer.Option(help="Time for the script, such as 5m (the default).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a profile and write its evidence folder.

    It runs in a fresh sandbox, which ends with it. Exits as the script did.
    """
    from cpuos.profiles import python_data
    from cpuos.profiles.catalog import get_profile
    from cpuos.types.units import parse_duration_s

    output = current_output(ctx)
    output.interrupted = "interrupted; its sandbox was ended, and nothing was written"
    again = _AgainLine(ctx)
    try:
        with output.working(f"running {name}") as work:

            def tell(text: str) -> None:
                work.printed()
                output.progress(text)

            evidence = python_data.run(
                get_profile(name),
                inputs=inputs or [],
                script=script,
                out=out,
                template=template,
                runtime=runtime,
                allow_emulated=allow_emulated or None,
                cpu=cpu,
                memory=memory,
                timeout_s=parse_duration_s(timeout, name="--timeout") if timeout is not None else None,
                on_progress=tell,
            )
    except InvalidRequest as error:
        if error.hint.startswith("--out "):
            error.hint = again.with_option(out=error.hint.removeprefix("--out "))
        raise
    if output.json:
        output.data(evidence)
    else:
        _print_evidence(output, evidence, out, again=again)
    if evidence.status == "failed":
        raise typer.Exit(_exit_code(evidence))


class _AgainLine:
    """The command line that was given, with something changed: as one can paste it."""

    def __init__(self, ctx: typer.Context) -> None:
        self._ctx = ctx

    def with_option(self, **changed: str) -> str:
        given = {**self._ctx.params, **changed}
        words = ["cpuos", "profile", "run", str(given["name"])]
        for parameter in self._ctx.command.params:
            value, option = given.get(parameter.name or ""), parameter.opts[0]
            if parameter.name == "name" or value is None or value == parameter.default or value == ():
                continue
            values = value if isinstance(value, list | tuple) else [value]
            for one in values:
                words += [] if one is False else [option] if one is True else [option, str(one)]
        return shlex.join(words)


def _print_evidence(output: Output, evidence: Evidence, out: Path, *, again: _AgainLine) -> None:
    if evidence.reason:
        output.progress(f"failed: {evidence.reason}")
        for name in ("stdout", "stderr"):
            _print_end(output, out / f"{name}.txt", name=name)
    sandbox, values = evidence.host.sandbox, evidence.guest.values
    pictures = [artifact for artifact in evidence.host.artifacts if artifact.media_type.startswith("image/")]
    charts = ", ".join(f"{out}/artifacts/{artifact.name}" for artifact in pictures)
    for note in evidence.notes:
        if not (evidence.reason and note.startswith("no values")):  # a script that failed says more than enough
            output.progress(note)
    if values is not None or not evidence.reason:
        output.line(f"values:    {json.dumps(values) if values is not None else 'none'}")
    if charts or not evidence.reason:
        output.line(f"chart:     {charts or 'none'}")
    output.line(f"isolation: {sandbox.isolation} ({sandbox.isolation_detail})")
    step = _next_step(evidence, out, again=again)
    output.progress(f"try: {step}" if evidence.reason else f"next:      {step}")


def _print_end(output: Output, path: Path, *, name: str) -> None:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if lines:
        output.progress(f"the end of its {name}:")
    for line in lines[-_SHOWN_LINES:]:
        output.progress(f"  {line}")


def _next_step(evidence: Evidence, out: Path, *, again: _AgainLine) -> str:
    """After a limit the same with more of it, else where to look."""
    command = evidence.host.command
    if command is not None and command.status == "oom_killed":
        return again.with_option(memory=f"{2 * evidence.host.sandbox.memory_mib}MiB")
    if command is not None and command.status == "timed_out":
        return again.with_option(timeout=f"{2 * (command.duration_s or 150):.0f}s")
    if evidence.reason and (missing := _NO_MODULE.search(_text_of(out / "stderr.txt"))):
        return f"cpuos template build --help  # a template with {missing[1]}"
    if evidence.reason and _text_of(out / "stderr.txt"):
        return f"cat {shlex.quote(f'{out}/stderr.txt')}"
    return f"python3 -m json.tool {shlex.quote(f'{out}/evidence.json')}"


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _exit_code(evidence: Evidence) -> int:
    command = evidence.host.command
    if command is None:
        return 125
    code = exit_code_of(command.status, exit_code=evidence.guest.exit_code, signal=evidence.guest.signal)
    return code or 125


def list_profiles(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the profiles: what each takes, returns and is limited to."""
    from cpuos.profiles import catalog

    output = current_output(ctx)
    profiles = catalog.list_profiles()
    if output.json:
        output.data({"profiles": profiles})
        return
    for profile in profiles:
        output.line(f"{profile.name}: {profile.summary}")
        for part in profile.takes:
            output.line(f"  takes    {part}")
        for part in profile.returns:
            output.line(f"  returns  {part}")
        limits = profile.limits
        output.line(
            f"  limits   {limits.cpu} CPU, {limits.memory_mib} MiB memory, {limits.disk_mib} MiB disk, "
            f"{limits.timeout_s:.0f} s, {limits.artifact_files} files and {limits.artifact_bytes >> 20} MiB back"
        )
