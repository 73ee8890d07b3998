"""Where previews are served: a domain that shares no cookie with any other part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["check_preview_domain", "check_preview_url"]

_DOMAIN = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


def check_preview_domain(value: str, others: Mapping[str, Any]) -> str:
    """The domain in lower case; ValueError where it cannot be kept apart from what the settings `others` name."""
    domain = value.lower()
    if not _DOMAIN.fullmatch(domain) or len(domain) > 200:
        raise ValueError(f"{value!r} is no domain name such as preview.example.com")
    urls = [others.get(name) or "" for name in ("api_public_url", "gateway_public_url")]
    names = [others.get(name) or "" for name in ("api_host", "gateway_host")]
    for name in [*names, *((urlsplit(url).hostname or "") for url in urls)]:
        name = name.lower()
        if domain == name or name.endswith(f".{domain}") or (domain.endswith(f".{name}") and name != "localhost"):
            raise ValueError(f"{domain} shares cookies with {name}, a name of the API or the gateway; take another")
    return domain


def check_preview_url(value: str, domain: str | None) -> str:
    """A preview URL names the preview domain, so that both say the same."""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or parts.hostname != domain):
        raise ValueError(f"{value!r} is not http:// or https:// with the setting preview_domain as its host")
    return value.rstrip("/")
