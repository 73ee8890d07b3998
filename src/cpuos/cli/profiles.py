"""profile run, profile ls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.results import exit_code_of

if TYPE_CHECKING:
    from cpuos.profiles.evidence import Evidence

__all__ = ["list_profiles", "register", "run_profile"]


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
    out: Annotated[Path, typer.Option("--out", "-o", help="Evidence folder; an earlier one is replaced.")] = Path(
        "evidence"
    ),
    template: Annotated[str | None, typer.Option(help="Another template than the profile's.")] = None,
    runtime: Annotated[str | None, typer.Option(help="gvisor, microvm, or auto (default): the strongest.")] = None,
    allow_emulated: Annotated[
        bool, typer.Option("--allow-emulated", help="Take a microVM without hardware that runs it: for development.")
    ] = False,
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
    evidence = python_data.run(
        get_profile(name),
        inputs=inputs or [],
        script=script,
        out=out,
        template=template,
        runtime=runtime,
        allow_emulated=allow_emulated or None,
        timeout_s=parse_duration_s(timeout, name="--timeout") if timeout is not None else None,
        on_progress=output.progress,
    )
    if output.json:
        output.data(evidence)
    else:
        _print_evidence(output, evidence, out)
    if evidence.status == "failed":
        raise typer.Exit(_exit_code(evidence))


def _print_evidence(output: Output, evidence: Evidence, out: Path) -> None:
    if evidence.reason:
        output.progress(f"failed: {evidence.reason}")
        errors = (out / "stderr.txt").read_text(errors="replace") if (out / "stderr.txt").exists() else ""
        for line in errors.splitlines()[-10:]:
            output.progress(f"  {line}")
    for note in evidence.notes:
        output.progress(note)
    pictures = [artifact for artifact in evidence.host.artifacts if artifact.media_type.startswith("image/")]
    charts = ", ".join(f"{out}/artifacts/{artifact.name}" for artifact in pictures)
    sandbox = evidence.host.sandbox
    output.line(f"values:    {json.dumps(evidence.guest.values) if evidence.guest.values is not None else 'none'}")
    output.line(f"chart:     {charts or 'none'}")
    output.line(f"isolation: {sandbox.isolation} ({sandbox.isolation_detail})")
    output.progress(f"next:      {'cat ' if evidence.reason else 'python3 -m json.tool '}{out}/evidence.json")


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
