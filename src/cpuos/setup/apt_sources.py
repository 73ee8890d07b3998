"""The apt sources that templates are built from: the host's own, as far as they are its distribution's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Source", "acquire_options", "distribution_sources", "without_credentials"]

COMPONENTS = frozenset({"main", "universe"})
_CARRIED_OPTION = re.compile(r"^Acquire::(https?|ftp|Retries|Check-|Force|Allow|Max-|Min-|Proxy)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One deb822 stanza: where from, which suites, signed by what."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""

    def __str__(self) -> str:
        lines = [
            "Types: deb",
            f"URIs: {' '.join(self.uris)}",
            f"Suites: {' '.join(self.suites)}",
            f"Components: {' '.join(self.components)}",
        ]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


def distribution_sources(codename: str, *, etc: Path = Path("/etc/apt")) -> list[Source]:
    """The host's sources for `codename`, its updates and its security suite; other vendors' are left out."""
    found: list[Source] = []
    lists = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*.list"))]
    for path in lists:
        if path.is_file():
            found += _one_line_sources(path.read_text(errors="replace").splitlines())
    for path in sorted((etc / "sources.list.d").glob("*.sources")):
        found += _deb822_sources(path.read_text(errors="replace"))
    suites = {codename, f"{codename}-updates", f"{codename}-security", f"{codename}/updates"}
    kept = []
    for source in found:
        ours = tuple(suite for suite in source.suites if suite in suites)
        parts = tuple(part for part in source.components if part in COMPONENTS)
        if ours and parts:
            kept.append(dataclasses.replace(source, suites=ours, components=parts))
    return kept


def acquire_options(dump: str) -> list[str]:
    """The lines of `apt-config dump` that say how to download: proxies, certificates, checks, retries."""
    lines = (line.strip() for line in dump.splitlines())
    return [line for line in lines if _CARRIED_OPTION.match(line) and not line.endswith('"";')]


def without_credentials(uri: str) -> str:
    """The URI without user and password."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", uri)


def _one_line_sources(lines: Iterable[str]) -> list[Source]:
    pattern = re.compile(r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)$")
    sources = []
    for line in lines:
        match = pattern.match(line.split("#")[0].strip())
        if match is None:
            continue
        signed_by = re.search(r"signed-by=(\S+)", match["options"] or "", re.IGNORECASE)
        sources.append(
            Source(
                uris=(match["uri"],),
                suites=(match["suite"],),
                components=tuple(match["components"].split()),
                signed_by=signed_by[1] if signed_by else "",
            )
        )
    return sources


def _deb822_sources(text: str) -> list[Source]:
    sources = []
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", lines):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace() and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no":
            sources.append(
                Source(
                    uris=tuple(fields.get("uris", "").split()),
                    suites=tuple(fields.get("suites", "").split()),
                    components=tuple(fields.get("components", "").split()),
                    signed_by=fields.get("signed-by", ""),
                )
            )
    return sources
