"""certs: previews by TLS on this machine."""

from __future__ import annotations

import typer

from cpuos.cli.output import JsonOption, current_output

__all__ = ["certs", "register"]


def register(app: typer.Typer) -> None:
    app.command("certs")(certs)


def certs(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Make a certificate for previews, and an authority of this machine that browsers can be told to trust.

    The authority can sign for the preview domain only. Called again, this makes a fresh certificate. A public domain
    needs none of it: there a proxy with a real certificate stands in front.
    """
    from cpuos.settings import load_settings
    from cpuos.setup.certificates import make_certificates

    output = current_output(ctx)
    made = make_certificates(load_settings())
    if output.json:
        values = {"domain": made.domain, "authority": made.authority, "certificate": made.certificate, "key": made.key}
        output.data({**values, "expires_at": made.expires_at})
        return
    output.line(str(made.certificate))
    output.progress(f"for *.{made.domain}, until {made.expires_at:%Y-%m-%d}")
    output.progress(f"1. trust {made.authority}: on Debian and Ubuntu")
    output.progress(f"   sudo cp {made.authority} /usr/local/share/ca-certificates/cpuos-previews.crt")
    output.progress("   sudo update-ca-certificates    # and import it in the browser's own settings")
    output.progress(f"2. sudo env CPUOS_PREVIEW_TLS_CERT={made.certificate} CPUOS_PREVIEW_TLS_KEY={made.key} cpuos up")
