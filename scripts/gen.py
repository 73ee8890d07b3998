"""Write what is generated from code; `--check` writes nothing and fails when a file differs.

python scripts/gen.py [--check] [NAME …]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def openapi() -> str:
    from cpuos.server.app import openapi as describe

    return json.dumps(describe(), indent=2, ensure_ascii=False) + "\n"


def errors() -> str:
    from cpuos.errors import ERRORS

    lines = [
        "# Errors",
        "",
        "Every error has the same three texts in API, SDK and CLI: what could not be done, why, and what to try.",
        "A program goes by the code. `CpuosError` is the base of all; the class is what the SDK raises, the status is",
        "what the API answers.",
        "",
        "```json",
        '{"error": {"code": "…", "what": "…", "why": "…", "try": "…", "details": {}}}',
        "```",
        "",
        "| code | class | status | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{code}` | `{kind.__name__}` | {status} | {text} |" for code, (kind, status, text) in ERRORS.items()]
    return "\n".join(lines) + "\n"


def cli() -> str:
    from gen_cli import render

    return render()


def sdk() -> str:
    from gen_sdk import render

    return render()


def settings() -> str:
    from gen_settings import render

    return render()


def blocked() -> str:
    from gen_blocked import render

    return render()


# name: (path, what makes it)
GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "openapi": ("api/openapi.json", openapi),
    "errors": ("docs/reference/errors.md", errors),
    "cli": ("docs/reference/cli.md", cli),
    "sdk": ("docs/reference/sdk.md", sdk),
    "settings": ("docs/reference/settings.md", settings),
    "blocked": ("docs/reference/always-blocked.md", blocked),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GENERATED)}; all without")
    arguments = parser.parse_args()
    differing = []
    for name in arguments.names or GENERATED:
        path, make = GENERATED[name]
        made, target = make(), ROOT / path
        if target.exists() and target.read_text() == made:
            continue
        differing.append(path)
        if not arguments.check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(made)
    for path in differing:
        print(f"{path}: differs from what the code says; run: make gen" if arguments.check else f"{path}: written")
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
