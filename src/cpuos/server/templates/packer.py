"""Programs of this host as files that run in any root: with the loader and the libraries that they were linked with."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

from cpuos.errors import SetupRequired

__all__ = ["Packer", "read_packer"]

_LINE = re.compile(r"(?:^|=> )\s*(/\S+) \(0x[0-9a-f]+\)")
_SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"


class Packer:
    """Names of the loader and the program, and the content of all their files, by name."""

    def __init__(self, *, loader: str, program: str, files: dict[str, bytes]) -> None:
        self.loader = loader
        self.program = program
        self.files = files


async def read_packer(name: str = "mkfs.erofs") -> Packer:
    """Read the files of this host; a build sandbox gets copies, and gives nothing back to them."""
    program = shutil.which(name, path=_SEARCH)
    if program is None:
        raise SetupRequired(f"cannot build templates: no {name} on this host", "", hint="cpuos setup")
    process = await asyncio.create_subprocess_exec(
        "ldd",
        program,
        env={"PATH": _SEARCH},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    told, _ = await process.communicate()
    paths = [Path(match[1]) for line in told.decode().splitlines() if (match := _LINE.search(line))]
    loaders = [path for path in paths if path.name.startswith(("ld-linux", "ld-musl", "ld64"))]
    if len(loaders) != 1:
        raise SetupRequired(f"cannot build templates: {program}", "its libraries are not known", hint="cpuos doctor")
    files = {path.name: await asyncio.to_thread(path.read_bytes) for path in [Path(program), *paths]}
    return Packer(loader=loaders[0].name, program=os.path.basename(program), files=files)
