"""net: what a sandbox may reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, current_output
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos import Network
    from cpuos.types.network import NetworkPolicy, SandboxNetwork

__all__ = ["AllowOption", "DenyOption", "NetworkOption", "net", "read_network", "register"]

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
    sandbox: Annotated[str, typer.Argument(help="Its id, name, or a unique start of its id.", metavar="SANDBOX")],
    network: NetworkOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a sandbox may reach, or replace it.

    A change holds when this returns: connections that are no longer allowed are cut.
    """
    output = current_output(ctx)
    wanted = read_network(network, allow=allow, deny=deny)
    with connected(sandbox) as sbx:
        shown = sbx.network.get() if wanted is None else sbx.network.update(wanted)
    if output.json:
        output.data(shown)
    else:
        _show(output, shown, sandbox=sbx.id)


def read_network(network: str | None, *, allow: list[str] | None, deny: list[str] | None) -> str | Network | None:
    """The policy that the options mean; None when none was given."""
    from cpuos import Network

    if not allow and not deny:
        return network
    if network == "off" or (network == "internet" and allow):
        raise InvalidRequest(
            f"cannot read the network options: --network {network} with --{'allow' if allow else 'deny'}",
            "--allow means that only these are reached, --deny that all but these are",
            hint="leave out --network",
        )
    return Network(allow=allow, deny=deny or ())


def _show(output: Output, shown: SandboxNetwork, *, sandbox: str) -> None:
    rows = [("sandbox", *_cells(shown.policy)), ("workspace", *_cells(shown.workspace_policy))]
    output.table(("POLICY", "MODE", "ALLOW", "DENY"), rows)
    if not shown.applied:
        output.progress("the newest version is not in place yet: the node has not answered")
    output.progress(f"what it connected to: cpuos audit --connections {sandbox}")


def _cells(policy: NetworkPolicy) -> tuple[str, str, str]:
    return policy.mode, " ".join(policy.allow), " ".join(policy.deny)
