"""up, down, status, doctor, setup, uninstall: cpuOS on this machine, done by `cpuos.setup` and `cpuos.services`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.hints import as_root, runnable
from cpuos.cli.installation import describe_client, describe_installation, find_client
from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.results import describe_pool, room_rows
from cpuos.errors import CpuosError, InvalidRequest, SetupRequired

if TYPE_CHECKING:
    from cpuos.services import Removal, Stopped
    from cpuos.settings import Settings
    from cpuos.setup.progress import Progress

__all__ = ["doctor", "down", "register", "require_server_parts", "setup", "status", "uninstall", "up"]


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("doctor")(doctor)
    app.command("setup")(setup)
    app.command("uninstall")(uninstall)


def up(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Start cpuOS and return when it is ready.

    What the machine lacks is set up first, with the plan shown. Parts that run other code are started anew; sandboxes
    run on. The API key is written for the user behind sudo.
    """
    require_server_parts()
    from cpuos import services

    output = current_output(ctx)
    instance = services.up(progress=_progress(output))
    if output.json:
        output.data(dataclasses.asdict(instance))
        return
    output.progress("cpuOS is running" if instance.started else "cpuOS was running already")
    output.line(instance.api_url)
    output.progress(f"key in {instance.credentials}; next: cpuos create")


def down(
    ctx: typer.Context,
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="Leave them running for the next `cpuos up`.")
    ] = False,
    pause: Annotated[
        bool, typer.Option("--pause", help="Pause those that run: before a reboot. Calls resume them after `cpuos up`.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop cpuOS on this machine, and end its sandboxes, paused ones too.

    With --pause none is ended: each goes on where it was when it is called after the next `cpuos up`, also when the
    machine was restarted in between. One that could not be paused is left running, and the exit code is 1.
    """
    require_server_parts()
    from cpuos import services

    output = current_output(ctx)
    if pause and keep_sandboxes:
        raise InvalidRequest("cannot both pause sandboxes and keep them running", hint="cpuos down --pause")
    with output.working("pausing and stopping" if pause else "stopping"):
        stopped = services.down(keep_sandboxes=keep_sandboxes, pause=pause)
    told = {"stopped": stopped.was_running, "sandboxes": stopped.sandboxes}
    if output.json:
        output.data({**told, "paused": stopped.paused, "left": stopped.left})
    else:
        _show_stopped(output, stopped)
    if stopped.left:
        raise typer.Exit(1)


def _show_stopped(output: Output, stopped: Stopped) -> None:
    state = "cpuOS is stopped" if stopped.was_running else "cpuOS was not running"
    if stopped.paused or stopped.left:
        state = f"{state}; {stopped.paused} paused"
    for sandbox_id, why in stopped.left.items():
        output.progress(f"left running: {sandbox_id}: {why}")
    ended = f"{stopped.sandboxes} sandbox{'' if stopped.sandboxes == 1 else 'es'} ended"
    output.progress(f"{state}; {ended}" if stopped.sandboxes else state)


def status(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show which parts of cpuOS run here, and the room for sandboxes."""
    require_server_parts()
    from cpuos import services

    output = current_output(ctx)
    found = services.status()
    capacity, alarms = _capacity(found.api_url), _alarms(found.api_url)
    pools = _pools(found.api_url)
    client = find_client()
    if output.json:
        told = {"capacity": capacity, "pools": pools, "alarms": alarms, "client": dataclasses.asdict(client)}
        output.data({**dataclasses.asdict(found), **told})
    else:
        for line in (*describe_installation(found), *describe_client(client, api_url=found.api_url)):
            output.line(line)
        rows = [
            (part.name, part.state, part.pid, "" if part.up_s is None else f"{part.up_s:.0f}s", part.restarts, part.log)
            for part in found.parts
        ]
        output.table(("PART", "STATE", "PID", "UP", "RESTARTS", "LOG"), rows)
        if capacity is not None:
            output.table(("ROOM", "PROMISED", "AT MOST", "MACHINE"), room_rows(capacity))
        for pool in pools.values():
            output.line(describe_pool(pool))
        for alarm in alarms:
            output.line(alarm)
        where = f"API at {found.api_url}" if found.api_url else f"try: {as_root('cpuos up')}"
        output.progress(f"{found.state}; {where}")
    if found.state != "ready":
        raise typer.Exit(1)


def _capacity(api_url: str | None) -> dict[str, Any] | None:
    """None where the server does not answer, or this user has no key for it."""
    from cpuos import Client

    if api_url is None:
        return None
    try:
        with Client(api_url) as client:
            return client.get_json("/v1/capacity")
    except CpuosError:
        return None


def _pools(api_url: str | None) -> dict[str, Any]:
    """By node; none where the server does not answer, or this user has no key for it."""
    from cpuos import Client

    if api_url is None:
        return {}
    try:
        with Client(api_url) as client:
            nodes = client.get_json("/v1/nodes")["nodes"]
    except CpuosError:
        return {}
    return {node["name"]: node["pool"] for node in nodes if node.get("pool")}


def _alarms(api_url: str | None) -> list[str]:
    """They need no key."""
    from cpuos import Client

    if api_url is None:
        return []
    try:
        with Client(api_url) as client:
            return list(client.get_json("/v1/health").get("alarms", []))
    except CpuosError:
        return []


def doctor(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Tell what this machine has and lacks.

    Boots a test sandbox where root asks; changes nothing. Each line that is not ok names the command that mends it.
    Exits with 1 where something is missing.
    """
    require_server_parts()
    from cpuos import services
    from cpuos.setup.doctor import CheckState, doctor_lines
    from cpuos.setup.doctor import doctor as examine

    output = current_output(ctx)
    with output.working("looking; a test sandbox is booted"):
        checks = [dataclasses.replace(check, fix=runnable(check.fix)) for check in examine()]
    found, client = services.status(), find_client()
    if output.json:
        told = {"data_dir": found.data_dir, "run_dir": found.run_dir, "other": found.other}
        output.data({"checks": [dataclasses.asdict(check) for check in checks], **told})
    else:
        for line in (*describe_installation(found), *describe_client(client, api_url=found.api_url)):
            output.line(line)
        for line in doctor_lines(checks):
            output.line(line)
    if any(check.state is CheckState.MISSING for check in checks):
        raise typer.Exit(1)


def setup(
    ctx: typer.Context,
    also: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[microvm] [storage]",
            help="microvm: also what microVMs need. storage: move the data onto a volume of its own.",
        ),
    ] = None,
    reflink_volume: Annotated[
        str,
        typer.Option(
            "--reflink-volume",
            metavar="SIZE",
            help="For storage: so large, all of it taken at once; snapshots and forks share blocks there.",
        ),
    ] = "",
    kernel: Annotated[
        Path | None, typer.Option("--kernel", help="For microvm: this kernel instead of the distribution's.")
    ] = None,
    modules: Annotated[
        Path | None, typer.Option("--modules", help="For microvm: the folder of that kernel's modules.")
    ] = None,
    firecracker: Annotated[
        str,
        typer.Option(
            "--firecracker",
            metavar="ARCHIVE",
            help="For microvm: Firecracker too, from its release's archive; `release` downloads that.",
        ),
    ] = "",
    host_ca: Annotated[
        bool, typer.Option("--host-ca", help="Carry this machine's CA bundle into the templates.")
    ] = False,
    host_mirrors: Annotated[
        bool, typer.Option("--host-mirrors", help="Carry its package mirrors, without credentials, into the templates.")
    ] = False,
    template: Annotated[
        list[str] | None, typer.Option("--template", help="Build this template too: node, browser or devbox.")
    ] = None,
    templates: Annotated[bool, typer.Option("--templates", help="Build all templates.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Install and build what cpuOS needs.

    Shows the plan with sizes and times first. What is done is skipped, so that a run goes on where an earlier one
    stopped.
    """
    require_server_parts()
    from cpuos.settings import load_settings
    from cpuos.setup.engine import set_up
    from cpuos.setup.microvm import KernelSource
    from cpuos.setup.steps import all_steps
    from cpuos.setup.templates import choose_templates

    output = current_output(ctx)
    wanted = set(also or ())
    if unknown := sorted(wanted - {"microvm", "storage"}):
        raise InvalidRequest(f"cannot set up: {unknown[0]!r}", "beside what is always set up are microvm and storage")
    if ("storage" in wanted) != bool(reflink_volume):
        why = "`storage` and `--reflink-volume SIZE` go together"
        raise InvalidRequest("cannot set up storage", why, hint="sudo cpuos setup storage --reflink-volume 100GiB")
    if os.geteuid() != 0:
        raise SetupRequired(
            "cannot set up cpuOS: not root",
            "it installs packages, users and templates",
            code="needs_root",
            hint="sudo cpuos setup",
        )
    carried = {"template_host_ca": host_ca, "template_host_mirrors": host_mirrors}
    settings = load_settings(**{name: True for name, wanted in carried.items() if wanted})
    if reflink_volume:
        _set_up_storage(output, settings, reflink_volume)
        if wanted == {"storage"}:
            return
    source = KernelSource(kernel=kernel, modules=modules) if "microvm" in wanted or kernel or firecracker else None
    chosen = choose_templates(template or (), all_of_them=templates)
    steps = all_steps(templates=chosen, guest_kernel=source, firecracker=firecracker)
    done = set_up(settings, steps, progress=_progress(output), hint="sudo cpuos setup")
    if output.json:
        output.data({"done": done})
    else:
        output.progress(f"{len(done)} steps done" if done else "everything is in place")


def _set_up_storage(output: Output, settings: Settings, size: str) -> None:
    from cpuos.setup.host import Host
    from cpuos.setup.volume import make_volume, volume_image
    from cpuos.types.units import parse_size_mib

    size_mib = parse_size_mib(size, name="--reflink-volume")
    with output.working("making the volume, and moving the data onto it"), open(os.devnull, "w") as log:
        made = make_volume(Host(settings, log=log), size_mib=size_mib)
    told = {"volume": str(volume_image(settings)), "size_mib": size_mib, "made": made}
    if output.json:
        output.data(told)
    else:
        state = "lies on" if made else "lay already on"
        output.progress(f"{settings.data_dir} {state} {told['volume']}; next: {as_root('cpuos up')}")


def uninstall(
    ctx: typer.Context,
    purge: Annotated[bool, typer.Option("--purge", help="Data, templates, caches, keys and users too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop cpuOS and remove what it made here.

    Without --purge the data directory and the `cpuos` command stay, for another `cpuos up`. What cannot be removed is
    told at the end, with the reason, and keeps nothing else. What belongs to another installation stays.
    """
    require_server_parts()
    from cpuos import services

    output = current_output(ctx)
    with output.working("removing"):
        done = services.uninstall(purge=purge)
    failed = any(left.is_failure for left in done.left)
    if output.json:
        output.data(dataclasses.asdict(done))
    else:
        for thing in done.removed:
            output.line(f"removed {thing}")
        for left in done.left:
            for line in (f"left: {left.what}", left.why, f"try: {runnable(left.hint)}"):
                output.progress(line)
        output.progress(_what_is_left(done, purge=purge))
    if failed:
        raise typer.Exit(1)


def _what_is_left(done: Removal, *, purge: bool) -> str:
    if done.left:
        return f"left are: {', '.join(left.what for left in done.left)}; the reasons stand above"
    if purge:
        return "nothing of it is left" if done.removed else "nothing of it was here"
    return f"the data directory and `cpuos` are left; to remove them too: {as_root('cpuos uninstall --purge')}"


def _progress(output: Output) -> Progress:
    from cpuos.setup.progress import choose_progress

    return choose_progress(sys.stderr)


def require_server_parts() -> None:
    """`pip install cpuos` is the client alone."""
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("pydantic_settings", "starlette", "sqlalchemy")):
        raise SetupRequired(
            "cannot run cpuOS on this machine: its server parts are not installed",
            "this is the light client",
            hint="pip install 'cpuos[all]'",
        )
