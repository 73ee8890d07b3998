"""Where the server is and which key opens it: argument, then environment, then the credentials file of `cpuos up`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cpuos.errors import AuthenticationError, InvalidRequest
from cpuos.key_file import key_file, key_file_below

__all__ = ["DEFAULT_API_URL", "Config", "load_config"]

DEFAULT_API_URL = "http://127.0.0.1:7070"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Address of the server, and the key, which does not print."""

    api_url: str
    api_key: str = field(repr=False)
    url_from: str = "an argument"
    """What named the address: a variable, a file, the default."""
    key_from: str = "an argument"
    """Where the key lies."""


def load_config(
    api_url: str | None = None,
    api_key: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> Config:
    """Find server and key. A key found in the file is sent only to the server that the file names."""
    environ = os.environ if environ is None else environ
    path = key_file_below(home) if home else _where(environ)
    stored_url, stored_key = _read_credentials(path)
    found, url_from = _first(
        (api_url, "an argument"),
        (environ.get("CPUOS_API_URL"), "CPUOS_API_URL"),
        (stored_url, str(path)),
        (DEFAULT_API_URL, "default"),
    )
    url = _checked(found)
    if url != _checked(stored_url or DEFAULT_API_URL):
        stored_key = None
    key, key_from = _first(
        (api_key, "an argument"), (environ.get("CPUOS_API_KEY"), "CPUOS_API_KEY"), (stored_key, str(path))
    )
    if not key:
        raise AuthenticationError(
            f"cannot find an API key for {url} (by {url_from})",
            f"CPUOS_API_KEY is not set and {path} {_why_none(path)}",
            code="key_missing",
            hint="cpuos up",
        )
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise AuthenticationError("cannot use the API key: it has characters that no key has", "see CPUOS_API_KEY")
    return Config(api_url=url, api_key=key, url_from=url_from, key_from=key_from)


def _first(*candidates: tuple[str | None, str]) -> tuple[str, str]:
    """The first that is there, and where from."""
    return next(((value, place) for value, place in candidates if value), ("", ""))


def _where(environ: Mapping[str, str]) -> Path:
    """Where `cpuos up` writes it. What root does for a user who has none there finds root's own."""
    place = key_file(environ)
    own = key_file({name: value for name, value in environ.items() if name != "SUDO_UID"})
    return own if os.path.exists(own) and not os.path.exists(place) else place


def _why_none(path: Path) -> str:
    try:
        path.open().close()
    except PermissionError:
        return "is not yours to read"
    except OSError:
        pass
    return "has no key for this server"


def _read_credentials(path: Path) -> tuple[str | None, str | None]:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except OSError:
        return None, None
    except ValueError as error:
        raise InvalidRequest(
            f"cannot read credentials: {path}",
            f"the file is not JSON: {error}",
            hint=f"rm {shlex.quote(str(path))} && cpuos up",
        ) from error
    if not isinstance(stored, dict):
        return None, None
    url, key = stored.get("api_url"), stored.get("api_key")
    return (url if isinstance(url, str) else None), (key if isinstance(key, str) else None)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"cannot use API URL: {url!r}",
            "it is http:// or https:// with a host",
            hint=f"export CPUOS_API_URL={DEFAULT_API_URL}",
        )
    return url.rstrip("/")
