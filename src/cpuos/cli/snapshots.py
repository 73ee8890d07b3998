"""pause, resume, recreate, snapshot, fork, snapshots: sandboxes that stand still, come back, and copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.output import JsonOption, Output, ago, current_output
from cpuos.cli.results import describe_recreated
from cpuos.cli.sandboxes import connected, parse_pairs

if TYPE_CHECKING:
    from cpuos import Sandbox

__all__ = [
    "fork",
    "list_snapshots",
    "pause",
    "recreate",
    "register",
    "remove_snapshot",
    "resume",
    "snapshot",
]

SandboxArgument = Annotated[str, typer.Argument(help="Its id, name, or a unique start of its id.", metavar="SANDBOX")]
LabelOption = Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE; may be repeated.")]


def register(app: typer.Typer) -> None:
    for command in (pause, resume, recreate, snapshot, fork):
        app.command(command.__name__)(command)
    group = command_group("Snapshots of sandboxes.")
    group.command("ls")(list_snapshots)
    group.command("rm")(remove_snapshot)
    app.add_typer(group, name="snapshots")


def pause(ctx: typer.Context, sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """Free a sandbox's memory and CPU; its files, processes and listeners come back when it is resumed.

    The next command, file call or visit of its previews resumes it.
    """
    with _moving(ctx, sandbox, "pausing") as (output, sbx):
        sbx.pause()
        _show(output, sbx)


def resume(
    ctx: typer.Context,
    sandbox: SandboxArgument,
    incomplete: Annotated[bool, typer.Option("--incomplete", help="Also where something of it is gone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Let a paused sandbox go on where it was: whole, or it stays paused and the error names what is missing."""
    with _moving(ctx, sandbox, "resuming") as (output, sbx):
        sbx.resume(incomplete=incomplete)
        _show(output, sbx)
        for missing in sbx.info.restore_incomplete or ():
            output.progress(f"did not come back: {missing}")


def recreate(ctx: typer.Context, sandbox: SandboxArgument, as_json: JsonOption = False) -> None:
    """Make a lost sandbox anew under its id, from the files that were kept of it, and say how old they are.

    Its programs are gone, and what was opened before - previews, streams - is void.
    """
    with _moving(ctx, sandbox, "recreating") as (output, sbx):
        recreated = sbx.recreate()
        _show(output, sbx)
        if recreated is not None:
            output.progress(describe_recreated(recreated))


def snapshot(
    ctx: typer.Context,
    sandbox: SandboxArgument,
    name: Annotated[str | None, typer.Option(help="A name: lower case letters, digits, hyphens.")] = None,
    memory: Annotated[bool, typer.Option(help="With its processes, or its files alone.")] = True,
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep what a sandbox is now, and print the snapshot's id.

    `cpuos create --snapshot` begins with it, as often as wanted.
    """
    labels = parse_pairs(label, option="--label") or None
    with _moving(ctx, sandbox, "making a snapshot of") as (output, sbx):
        made = sbx.snapshot(name, memory=memory, labels=labels).info
        if output.json:
            output.data(made)
            return
        output.line(made.id)
        output.progress(f"{_size(made.size_bytes)}, {'with its processes' if made.memory else 'files alone'}")


def fork(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="A sandbox, or with --snapshot a snapshot.", metavar="SANDBOX")],
    count: Annotated[int, typer.Option("--count", "-n", help="How many; all are made or none.", min=1)] = 1,
    of_snapshot: Annotated[bool, typer.Option("--snapshot", help="SANDBOX names a snapshot.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Session length of each.")] = None,
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make running copies of a sandbox as it is now, and print their ids. It goes on itself."""
    from cpuos import Client, Sandbox, Snapshot

    output = current_output(ctx)
    labels = parse_pairs(label, option="--label") or None
    with Client() as client:
        kind = Snapshot.get if of_snapshot else Sandbox.connect
        with output.working(f"forking {source}"):
            made = kind(source, client=client).fork(count, timeout=timeout, labels=labels)
    if output.json:
        output.data({"sandboxes": [one.info for one in made]})
        return
    for one in made:
        output.line(one.id)


def list_snapshots(
    ctx: typer.Context,
    sandbox: Annotated[str | None, typer.Option(help="Only those of this sandbox.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List snapshots, newest first."""
    from cpuos import Client, Snapshot

    output = current_output(ctx)
    with Client() as client:
        shown = Snapshot.list(sandbox=sandbox, client=client)
    if output.json:
        output.data({"snapshots": shown})
    elif quiet:
        for info in shown:
            output.line(info.id)
    else:
        rows = [
            (
                info.id,
                info.name,
                f"{info.state}: {info.reason}" if info.reason else info.state,
                info.sandbox,
                info.template,
                "yes" if info.memory else "no",
                _size(info.size_bytes),
                ago(info.created_at),
            )
            for info in shown
        ]
        headings = ("ID", "NAME", "STATE", "SANDBOX", "TEMPLATE", "PROCESSES", "SIZE", "AGE")
        output.table(headings, rows, empty="no snapshot; make one with: cpuos snapshot SANDBOX")


def remove_snapshot(
    ctx: typer.Context,
    snapshots: Annotated[list[str], typer.Argument(help="Ids, names, or unique starts of ids.", metavar="SNAPSHOT…")],
    as_json: JsonOption = False,
) -> None:
    """Remove snapshots. Sandboxes that began with them live on."""
    from cpuos import Client, Snapshot

    output = current_output(ctx)
    removed = []
    with Client() as client:
        for reference in snapshots:
            one = Snapshot.get(reference, client=client)
            one.delete()
            removed.append(one.id)
            if not output.json:
                output.line(one.id)
    if output.json:
        output.data({"removed": removed})


@contextmanager
def _moving(ctx: typer.Context, reference: str, doing: str) -> Iterator[tuple[Output, Sandbox]]:
    output = current_output(ctx)
    with output.working(f"{doing} {reference}"), connected(reference) as sbx:
        yield output, sbx


def _show(output: Output, sbx: Sandbox) -> None:
    if output.json:
        output.data(sbx.info)
        return
    output.line(sbx.id)
    output.progress(f"{sbx.state}: {sbx.info.reason}" if sbx.info.reason else sbx.state)


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB" if count < 10 << 30 else f"{count / (1 << 30):.1f} GiB"
