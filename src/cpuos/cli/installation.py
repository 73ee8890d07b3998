"""Which installation a line is about: there may be several on one machine, and the client may speak to another."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuos.errors import CpuosError

if TYPE_CHECKING:
    from cpuos.services import InstanceStatus

__all__ = ["ClientPlace", "describe_client", "describe_installation", "find_client", "name_place"]


@dataclass(frozen=True, kw_only=True)
class ClientPlace:
    """Where this user's calls go."""

    api_url: str
    url_from: str
    key_from: str
    problem: str = ""
    """Why they go nowhere."""


def find_client() -> ClientPlace:
    from cpuos.client.config import load_config

    try:
        config = load_config()
    except CpuosError as error:
        return ClientPlace(api_url="", url_from="", key_from="", problem=f"{error.what}: {error.why}")
    return ClientPlace(api_url=config.api_url, url_from=config.url_from, key_from=config.key_from)


def describe_installation(found: InstanceStatus) -> list[str]:
    """Its folders; where another one runs from its run directory, whose parts are shown."""
    apart = Path(found.data_dir) not in Path(found.state_dir).parents
    state = f", state in {found.state_dir}" if apart else ""
    lines = [f"installation  {found.data_dir}{state}, runs from {found.run_dir}"]
    if found.other is not None:
        lines.append(f"              not running: the parts in {found.run_dir} are those of the one in {found.other}")
        lines.append(f"              try: CPUOS_STATE_DIR={shlex.quote(found.other)} cpuos status")
    return lines


def describe_client(client: ClientPlace, *, api_url: str | None) -> list[str]:
    """Where `cpuos create` and the others go, and that it is elsewhere where it is."""
    if client.problem:
        return [f"client        {client.problem}"]
    lines = [f"client        {client.api_url} by {client.url_from}, key in {client.key_from}"]
    if api_url is not None and client.api_url != api_url:
        lines.append(f"              that is not this installation, whose API is at {api_url}")
    return lines


def name_place(error: CpuosError) -> None:
    """Add to a refused key or a silent server who was asked, and what said so."""
    if error.code not in ("key_invalid", "server_unavailable"):
        return
    client = find_client()
    if client.problem:
        return
    key = f" with the key in {client.key_from}" if error.code == "key_invalid" else ""
    error.why = f"{error.lines()[1]}; asked was {client.api_url}, by {client.url_from}{key}"
