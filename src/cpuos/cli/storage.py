"""df, prune: what takes room on the nodes, and what of it nobody needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos.types.storage import NodeStorage, StorageItem

__all__ = ["df", "prune", "register"]


def register(app: typer.Typer) -> None:
    app.command("df")(df)
    app.command("prune")(prune)


def df(
    ctx: typer.Context,
    every: Annotated[bool, typer.Option("--all", "-a", help="Each thing, not the sums of each kind.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what takes room on the nodes.

    REAL is what the files take on the volume, LENGTH what they would without holes, SHARED what of that others have
    too. Needs a key with the permission nodes.write.
    """
    from cpuos import Client

    output = current_output(ctx)
    with Client() as client, output.working("looking"):
        storage = client.storage()
    if output.json:
        output.data(storage)
        return
    for node in storage.nodes:
        _show_volume(output, node)
        headings = ("KIND", "NAME", "STATE", "REAL", "LENGTH", "SHARED", "NOT NEEDED")
        rows = [_row(item) for item in node.items] if every else _sums(node.items)
        output.table(headings if every else ("KIND", "COUNT", "REAL", "LENGTH", "SHARED", "NOT NEEDED"), rows)


def prune(
    ctx: typer.Context,
    layers_unused: Annotated[
        str, typer.Option(metavar="TIME", help="What steps of builds have left goes when it was not used for so long.")
    ] = "1d",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; else the plan is shown and you are asked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what nobody needs.

    That is: what steps of builds have left and no build has begun with of late, images of templates that nothing was
    begun with, old versions of the runtime, downloads of set-up. The plan is shown first. Sandboxes, snapshots and
    templates stay, and what a build at work may begin with.
    """
    from cpuos import Client

    output = current_output(ctx)
    with Client() as client:
        with output.working("looking"):
            planned = client.prune(layers_unused=layers_unused)
        if not output.json:
            output.table(("KIND", "NAME", "REAL", "WHY"), [_reason(item) for item in planned.items])
        if not planned.items:
            output.progress("nothing to remove")
        elif not yes and output.json:
            raise InvalidRequest("cannot ask with --json", "the plan is not confirmed", hint="cpuos prune --yes --json")
        elif yes or typer.confirm(f"Remove these ({_size(planned.freed_bytes)})?", err=True):
            planned = client.prune(dry_run=False, layers_unused=layers_unused)
            output.progress(f"{len(planned.items)} removed, {_size(planned.freed_bytes)} freed")
    if output.json:
        output.data(planned)


def _show_volume(output: Output, node: NodeStorage) -> None:
    volume, copies = node.volume, "copies share blocks" if node.reflink else "copies are sparse"
    state = ", FULL: sandboxes stand still" if volume.full else ""
    free, total = _size(volume.free_bytes), _size(volume.total_bytes)
    output.line(f"{node.node}: {free} of {total} free, {copies}{state}")


def _row(item: StorageItem) -> tuple[str, ...]:
    sizes = (_size(item.real_bytes), _size(item.apparent_bytes), _size(item.shared_bytes))
    return (item.kind, item.name, item.state, *sizes, item.why)


def _reason(item: StorageItem) -> tuple[str, ...]:
    return (item.kind, item.name, _size(item.real_bytes), item.why)


def _sums(items: list[StorageItem]) -> list[tuple[str, ...]]:
    rows = []
    for kind in dict.fromkeys(item.kind for item in items):  # the kind of the largest first
        own = [item for item in items if item.kind == kind]
        sums = [sum(getattr(item, f"{name}_bytes") for item in own) for name in ("real", "apparent", "shared")]
        unneeded = sum(item.real_bytes for item in own if not item.needed)
        rows.append((kind, str(len(own)), *map(_size, sums), _size(unneeded) if unneeded else ""))
    return rows


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
