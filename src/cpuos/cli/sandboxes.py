"""create, ls: sandboxes themselves. (`kill` is in commands.py: it also ends one command.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, ago, current_output, in_future
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Sandbox
    from cpuos.types.sandbox import Sandbox as SandboxInfo

__all__ = ["connected", "create", "list_sandboxes", "no_sandbox", "parse_pairs", "register"]

_PAIRS = {
    "--label": "cpuos create --label team=research",
    "--pack": "cpuos create --pack /data=my-pack",
    "PATH=NAME": "cpuos pack attach SANDBOX /data=my-pack",
    "--env": "cpuos exec --env MODE=test SANDBOX -- env",
}


def register(app: typer.Typer) -> None:
    app.command("create")(create)
    app.command("ls")(list_sandboxes)


def create(
    ctx: typer.Context,
    template: Annotated[
        str | None, typer.Option("--template", "-t", help="Prepared image to start from (default python).")
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", help="Begin with a snapshot; what is not given is as there.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A host name: lower case letters, digits, hyphens.")] = None,
    cpu: Annotated[int | None, typer.Option(help="CPUs (default 2).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, such as 512MiB or 4GiB (default 2GiB).")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk, such as 8GiB (default).")] = None,
    max_processes: Annotated[
        int | None, typer.Option(help="Most processes at once (default 512, or one for each 2 MiB of memory).")
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="Session length (default 15m).")] = None,
    on_timeout: Annotated[str | None, typer.Option(help="What then becomes of it: kill (default) or pause.")] = None,
    idle_timeout: Annotated[str | None, typer.Option(help="So long without any use: --on-idle.")] = None,
    on_idle: Annotated[str | None, typer.Option(help="pause (default) or kill.")] = None,
    auto_resume: Annotated[bool, typer.Option(help="Whether a call or visit resumes it while it is paused.")] = True,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; may be repeated.")] = None,
    task: Annotated[str | None, typer.Option(help="Id of the task that owns it, in your application.")] = None,
    network: Annotated[str | None, typer.Option("--network", help="internet (default) or off.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Reach only this: *.example.com, 1.2.3.0/24:443; may be repeated."),
    ] = None,
    deny: Annotated[list[str] | None, typer.Option("--deny", help="Never reach this; may be repeated.")] = None,
    alarm: Annotated[
        list[str] | None,
        typer.Option("--alarm", help="cpu=90%/10m:pause: what it may use for a while; may be repeated."),
    ] = None,
    pack: Annotated[
        list[str] | None, typer.Option("--pack", help="PATH=NAME: have a data pack there; may be repeated.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="gvisor, microvm, or auto (default): the strongest.")] = None,
    min_isolation: Annotated[str | None, typer.Option(help="Refuse less than: microvm, gvisor, emulated.")] = None,
    allow_emulated: Annotated[
        bool, typer.Option("--allow-emulated", help="Take a microVM without hardware that runs it: for development.")
    ] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="A repeat with this key gives the same sandbox.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a sandbox and print its id.

    It runs until `cpuos kill` or the end of its timeout, which does not count while it is paused.
    """
    from cpuos import Client, Sandbox
    from cpuos.cli.networks import read_network

    output = current_output(ctx)
    wishes = {
        "snapshot": snapshot,
        "name": name,
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "max_processes": max_processes,
        "timeout": timeout,
        "on_timeout": on_timeout,
        "idle_timeout": idle_timeout,
        "on_idle": on_idle,
        "auto_resume": None if auto_resume else False,
        "labels": parse_pairs(label, option="--label"),
        "task": task,
        "network": read_network(network, allow=allow, deny=deny, command="cpuos create"),
        "alarms": alarm,
        "packs": parse_pairs(pack, option="--pack"),
        "runtime": runtime,
        "min_isolation": min_isolation,
        "allow_emulated": allow_emulated or None,
        "idempotency_key": idempotency_key,
    }
    given = {key: value for key, value in wishes.items() if value is not None and value != {}}
    output.interrupted = "interrupted; no sandbox is left"
    with output.working(f"creating a sandbox from {snapshot or template or 'python'}"), Client() as client:
        info = Sandbox.create(template, client=client, **given).info
    if output.json:
        output.data(info)
        return
    output.line(info.id)
    how = {"pool": "was ready", "restore": "restored", "cold": "started cold"}.get(info.started_from or "", "")
    parts = [f"{info.isolation} ({info.isolation_detail})", how, f"ends in {in_future(info.expires_at)}"]
    output.progress(", ".join(part for part in parts if part))


def list_sandboxes(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; may be repeated.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List sandboxes that are alive, newest first."""
    from cpuos import Client, Sandbox

    output = current_output(ctx)
    with Client() as client:
        wanted = state if state is not None else "all" if everything else None
        shown = Sandbox.list(state=wanted, labels=parse_pairs(label, option="--label"), client=client)
    if output.json:
        output.data({"sandboxes": shown})
    elif quiet:
        for info in shown:
            output.line(info.id)
    else:
        rows = [
            (
                info.id,
                info.name,
                _state(info),
                info.template,
                info.isolation,
                ago(info.created_at),
                _left(info),
            )
            for info in shown
        ]
        headings = ("ID", "NAME", "STATE", "TEMPLATE", "ISOLATION", "AGE", "ENDS IN")
        output.table(headings, rows, empty="no sandbox; make one with: cpuos create")


def _state(info: SandboxInfo) -> str:
    """With its reason, or with what it uses too much of."""
    alarms = ", ".join(sorted({f"alarm {one.rule.text}" for one in info.active_alarms}))
    return ": ".join(part for part in (info.state, info.reason or alarms) if part)


def _left(info: SandboxInfo) -> str:
    """The session time it has: of a paused one that stands still."""
    if info.ended_at is not None:
        return ""
    return in_future(info.expires_at) if info.left_s is None else f"{info.left_s:.0f}s of running"


def no_sandbox(command: str) -> InvalidRequest:
    """No word stands where the sandbox should: most often of a variable."""
    return InvalidRequest(
        "cannot tell which sandbox is meant: none is given",
        "a variable such as $box is empty when the create that should fill it has failed",
        hint=f"{command} --help",
    )


@contextmanager
def connected(reference: str) -> Iterator[Sandbox]:
    """An existing sandbox by id, unique prefix or name; its connections end with the block, it does not."""
    from cpuos import Client, Sandbox

    with Client() as client:
        yield Sandbox.connect(reference, client=client)


def parse_pairs(texts: list[str] | None, *, option: str) -> dict[str, str]:
    """KEY=VALUE options as a dictionary."""
    pairs: dict[str, str] = {}
    for text in texts or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise InvalidRequest(
                f"cannot read {option}: {text!r}", "it is written KEY=VALUE", hint=_PAIRS.get(option, "cpuos --help")
            )
        pairs[key] = value
    return pairs
