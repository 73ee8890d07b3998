"""pack: build, ls, inspect, attach, rm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpuos.cli.groups import command_group
from cpuos.cli.output import JsonOption, ago, current_output
from cpuos.cli.sandboxes import parse_pairs

if TYPE_CHECKING:
    from cpuos.types.pack import Pack

__all__ = ["attach_pack", "build_pack", "inspect_pack", "list_packs", "register", "remove_pack"]

NameArgument = Annotated[str, typer.Argument(help="Name of a data pack.", metavar="NAME")]


def register(app: typer.Typer) -> None:
    group = command_group("Read-only data, shared by sandboxes.")
    group.command("build")(build_pack)
    group.command("ls")(list_packs)
    group.command("inspect")(inspect_pack)
    group.command("attach")(attach_pack)
    group.command("rm")(remove_pack)
    app.add_typer(group, name="pack")


def build_pack(
    ctx: typer.Context,
    name: NameArgument,
    path: Annotated[str, typer.Argument(help="Local folder or file; with --sandbox a folder in that.", metavar="PATH")],
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="Make it of a folder of this sandbox.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk of the sandbox that packs it (default: by its size).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a data pack of a folder, and print its digest.

    Sandboxes get it by `cpuos create --pack /data/NAME=NAME`. Those that have an earlier one of that name keep it.
    """
    from cpuos import Client, DataPack, Sandbox

    output = current_output(ctx)
    with output.working(f"packing {path}"), Client() as client:
        if sandbox is not None:
            pack = DataPack.of(Sandbox.connect(sandbox, client=client), name, path)
        else:
            pack = DataPack.build(name, Path(path), disk=disk, client=client)
    if output.json:
        output.data(pack)
    else:
        output.line(pack.digest)
        output.progress(f"{pack.files} files, {pack.size_bytes / (1 << 20):.1f} MiB")


def list_packs(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the data packs of the workspace."""
    from cpuos import Client, DataPack

    output = current_output(ctx)
    with Client() as client:
        packs = DataPack.list(client=client)
    headings = ("NAME", "DIGEST", "SIZE", "FILES", "AGE")
    output.listing("packs", packs, headings, _row, empty="no data pack; cpuos pack build NAME PATH")


def inspect_pack(ctx: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show digest and size of a data pack."""
    from cpuos import Client, DataPack

    output = current_output(ctx)
    with Client() as client:
        pack = DataPack.get(name, client=client)
    output.fields(pack, list(pack.model_dump(mode="json").items()))


def attach_pack(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Id or name of a sandbox.", metavar="SANDBOX")],
    packs: Annotated[list[str], typer.Argument(help="PATH=NAME: where the data pack is to be.", metavar="PATH=NAME…")],
    as_json: JsonOption = False,
) -> None:
    """See that a sandbox has data packs; refused where it was not made with them.

    No runtime takes any into a sandbox that runs: give them to `cpuos create --pack`.
    """
    from cpuos import Client, Sandbox

    output = current_output(ctx)
    with Client() as client:
        sbx = Sandbox.connect(sandbox, client=client)
        sbx.attach_packs(parse_pairs(packs, option="PATH=NAME") or {})
    if output.json:
        output.data({"packs": sbx.info.packs})


def remove_pack(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="Names of data packs.", metavar="NAME…")],
    as_json: JsonOption = False,
) -> None:
    """Remove data packs; refused while a sandbox or a snapshot has one."""
    from cpuos import Client, DataPack

    output = current_output(ctx)
    with Client() as client:
        output.removed(names, lambda name: DataPack.delete(name, client=client))


def _row(pack: Pack) -> tuple[Any, ...]:
    return pack.name, pack.digest[:19], f"{pack.size_bytes / (1 << 20):.1f} MiB", pack.files, ago(pack.created_at)
