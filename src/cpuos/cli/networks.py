"""net: what a sandbox, or every sandbox of the workspace, may reach."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Network
    from cpuos.types.network import NetworkPolicy, SandboxNetwork

__all__ = ["AllowOption", "DenyOption", "NetworkOption", "net", "read_network", "register"]

_HEADINGS = ("POLICY", "MODE", "ALLOW", "DENY")

NetworkOption = Annotated[str | None, typer.Option("--network", help="internet (default) or off.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Reach only this: *.example.com, 1.2.3.0/24:443; may be repeated."),
]
DenyOption = Annotated[list[str] | None, typer.Option("--deny", help="Never reach this; may be repeated. It wins.")]


def register(app: typer.Typer) -> None:
    app.command("net")(net)


def net(
    ctx: typer.Context,
    sandbox: Annotated[
        str | None, typer.Argument(help="Its id, name, or a unique start of its id.", metavar="SANDBOX")
    ] = None,
    workspace: Annotated[
        bool, typer.Option("--workspace", help="The policy that holds for every sandbox, beside its own.")
    ] = False,
    network: NetworkOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a sandbox may reach, or replace it.

    A change holds when this returns: connections that are no longer allowed are cut. With --workspace it is the policy
    of the whole workspace; a destination must be allowed by both.
    """
    output = current_output(ctx)
    if (sandbox is None) is not workspace:
        raise InvalidRequest(
            "cannot tell whose network is meant: " + ("--workspace with a sandbox" if workspace else "no sandbox"),
            "it is either one sandbox or, with --workspace, all of them",
            hint="cpuos net --workspace" if workspace else "cpuos ls",
        )
    named = shlex.quote(sandbox) if sandbox is not None else "--workspace"
    wanted = read_network(network, allow=allow, deny=deny, command=f"cpuos net {named}")
    if sandbox is None:
        _net_of_workspace(output, wanted)
        return
    with connected(sandbox) as sbx:
        shown = sbx.network.get() if wanted is None else sbx.network.update(wanted)
    if output.json:
        output.data(shown)
    else:
        _show(output, shown, sandbox=sbx.id)


def _net_of_workspace(output: Output, wanted: str | Network | None) -> None:
    from cpuos import Client

    with Client() as client:
        shown = client.network.get() if wanted is None else client.network.update(wanted)
    if output.json:
        output.data(shown)
        return
    output.table(_HEADINGS, [("workspace", *_cells(shown.policy))])
    output.progress("what one sandbox may reach: cpuos net SANDBOX")


def read_network(
    network: str | None, *, allow: list[str] | None, deny: list[str] | None, command: str
) -> str | Network | None:
    """The policy that the options mean; None when none was given. `command` is what they were written after."""
    from cpuos import Network

    if network not in (None, "internet", "off"):
        raise InvalidRequest(
            f"cannot read the network options: --network {network}",
            "it is internet or off; --allow and --deny take names and addresses",
            hint=f"{command} --network off",
        )
    for option, entries in (("--allow", allow or ()), ("--deny", deny or ())):
        for entry in entries:
            _check_entry(entry, option=option, command=command)
    if not allow and not deny:
        return network
    if network == "off" or (network == "internet" and allow):
        option, entries = ("--allow", allow) if allow else ("--deny", deny or [])
        raise InvalidRequest(
            f"cannot read the network options: --network {network} with {option}",
            "--allow means that only these are reached, --deny that all but these are",
            hint=f"{command} {option} {shlex.quote(entries[0])}",
        )
    return Network(allow=allow, deny=deny or ())


def _check_entry(entry: str, *, option: str, command: str) -> None:
    from cpuos.types.targets import parse_target

    try:
        parse_target(entry)
    except ValueError as error:
        raise InvalidRequest(
            f"cannot read the network options: {option} {entry}", str(error), hint=f"{command} {option} '*.example.com'"
        ) from None


def _show(output: Output, shown: SandboxNetwork, *, sandbox: str) -> None:
    rows = [("sandbox", *_cells(shown.policy)), ("workspace", *_cells(shown.workspace_policy))]
    output.table(_HEADINGS, rows)
    if not shown.applied:
        output.progress("the newest version is not in place yet: the node has not answered")
    output.progress(f"what it connected to: cpuos audit --connections {sandbox}")


def _cells(policy: NetworkPolicy) -> tuple[str, str, str]:
    return policy.mode, " ".join(policy.allow), " ".join(policy.deny)
