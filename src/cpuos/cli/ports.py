"""ports: servers in a sandbox, shown to visitors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cpuos.cli.output import JsonOption, Output, ago, current_output, in_future
from cpuos.cli.sandboxes import connected
from cpuos.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuos.types.port import Port

__all__ = ["ports", "register"]


def register(app: typer.Typer) -> None:
    app.command("ports")(ports)


def ports(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Argument(help="Its id, name, or a unique start of its id.", metavar="SANDBOX")],
    port: Annotated[int | None, typer.Argument(help="Of a server inside.", metavar="[PORT]", min=1, max=65535)] = None,
    public: Annotated[bool, typer.Option("--public", help="Whoever has the URL may see it.")] = False,
    close: Annotated[bool, typer.Option("--close", help="Stop showing it; URLs given so far are void.")] = False,
    expires: Annotated[
        str | None, typer.Option(help="How long the URL is good (default 1h; a public one: until it is closed).")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="localhost: for a server that answers only to that name.", metavar="NAME")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a URL for a server inside a sandbox, or list what is published.

    Private unless --public: the URL carries a token that opens this port only.
    """
    output = current_output(ctx)
    if port is None and (public or close or expires or host):
        raise InvalidRequest(
            "cannot read the options: they are for one port", "name its number", hint=f"cpuos ports {sandbox} 3000"
        )
    if close and (public or expires or host):
        raise InvalidRequest(
            "cannot read the options: --close takes no other",
            "it closes the port for everyone",
            hint=f"cpuos ports {sandbox} {port} --close",
        )
    if host not in (None, "localhost"):
        raise InvalidRequest(
            f"cannot read the options: --host {host}",
            "it is localhost, or left out",
            hint=f"cpuos ports {sandbox} {port} --host localhost",
        )
    with connected(sandbox) as sbx:
        if port is None or close:
            if port is not None:
                sbx.ports.close(port)
            _show(output, sbx.ports.list(), sandbox=sbx.id)
            return
        try:
            access = sbx.ports.publish(port, public=public, expires=expires, host=host)
        except InvalidRequest as error:
            error.hint = f"cpuos ports {sandbox} 3000" + (" --expires 12h" if expires else "")
            raise
        also_public = not public and any(one.public for one in sbx.ports.list() if one.port == port)
    url = access.url if access.token is None else f"{access.url}?cpuos_token={access.token}"
    if output.json:
        output.data({**access.model_dump(mode="json"), "open": url})
        return
    output.line(url)
    kind = "public" if access.token is None else "public without the token too; the token" if also_public else "private"
    until = f"for {in_future(access.expires_at)}" if access.expires_at else "until it is closed"
    output.progress(f"{kind}, {until}; to end it: cpuos ports {sbx.id} {port} --close")


def _show(output: Output, shown: list[Port], *, sandbox: str) -> None:
    if output.json:
        output.data({"ports": shown})
        return
    rows = [
        (one.port, "public" if one.public else "private", one.url, one.host, ago(one.created_at), one.created_by)
        for one in shown
    ]
    headings = ("PORT", "ACCESS", "URL", "HOST", "AGE", "BY")
    output.table(headings, rows, empty=f"no published port; publish one with: cpuos ports {sandbox} 3000")
