"""Makes the sync client and its tests out of the async ones, token by token.

python scripts/gen_sync.py            write
python scripts/gen_sync.py --check    exit 1 when what is committed differs
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "src" / "cpuos" / "client"
TESTS = ROOT / "tests" / "unit" / "client"
HEADER = "# Generated from {source} by scripts/gen_sync.py; edit that.\n"

# Names that differ; every Async… name loses its prefix besides.
NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "_async": "_sync",
    "_backend_async": "_backend_sync",
    "_httpx_async": "_httpx_sync",
    "aclose": "close",
    "aclosing": "closing",
    "anext": "next",
    "asynccontextmanager": "contextmanager",
}
DROPPED = frozenset({"async", "await"})


def sync_pairs() -> dict[Path, Path]:
    """Each hand-written file and the one made of it."""
    pairs = {path: CLIENT / "_sync" / path.name for path in sorted((CLIENT / "_async").glob("*.py"))}
    for path in sorted(TESTS.glob("test_async_*.py")):
        pairs[path] = path.with_name(path.name.replace("test_async_", "test_sync_"))
    return pairs


def make_sync(source: str, *, name: str) -> str:
    """The sync text of an async module."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    pieces: list[str] = []
    row, column = 1, 0
    for token in tokens:
        if token.type == tokenize.ENDMARKER:
            break
        pieces.append(_between(lines, (row, column), token.start))
        row, column = token.end
        if token.type == tokenize.NAME and token.string in DROPPED:
            # The space behind the word goes with it.
            line = lines[row - 1]
            while column < len(line) and line[column] == " ":
                column += 1
            continue
        pieces.append(_rewrite(token))
    text = "".join(pieces)
    return _format(HEADER.format(source=name) + text)


def _rewrite(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return _rewrite_name(token.string)
    if token.type in (tokenize.STRING, tokenize.COMMENT):
        text = re.sub(r"\bawait ", "", token.string)
        text = re.sub(r"\basync (with|for|def)\b", r"\1", text)
        return re.sub(r"\w+", lambda word: _rewrite_name(word[0]), text)
    return token.string


def _rewrite_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    return re.sub(r"^(_?)Async(?=[A-Z])", r"\1", name)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Blanks and line joins, which are no tokens."""
    if start[0] > len(lines):
        return ""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    last = lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else ""
    return "".join([lines[start[0] - 1][start[1] :], *middle, last])


def _format(text: str) -> str:
    for arguments in (["check", "--fix", "--unsafe-fixes", "--select", "I,UP,RUF022,SIM117", "-q"], ["format", "-q"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(CLIENT / "_sync" / "x.py"), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write, or compare."""
    stale = []
    pairs = sync_pairs()
    for source, target in pairs.items():
        text = make_sync(source.read_text(), name=str(source.relative_to(ROOT)))
        if not target.exists() or target.read_text() != text:
            stale.append(target)
            if "--check" not in arguments:
                target.parent.mkdir(exist_ok=True)
                target.write_text(text)
    for extra in {*(CLIENT / "_sync").glob("*.py")} - set(pairs.values()):
        stale.append(extra)
        if "--check" not in arguments:
            extra.unlink()
    if "--check" in arguments and stale:
        print("not as generated; run `python scripts/gen_sync.py`:", *stale, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
