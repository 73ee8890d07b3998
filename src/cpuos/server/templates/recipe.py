"""From the fields of a build to its key and the programs of its steps. Pure functions: nothing here runs anything."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass

from cpuos.types.template import UNKEPT_FOLDERS, BuildFile, BuildStep, Dropped, TemplateBuild

__all__ = [
    "IMAGE",
    "REST",
    "TOO_LARGE_EXIT",
    "UNREST",
    "WORK",
    "Packed",
    "Step",
    "build_key",
    "layer_keys",
    "pack_step",
    "read_packed",
    "steps_of",
    "steps_shown",
]

WORK = "/workspace/.cpuos-build"
"""Of the build sandbox: the packer's programs, and the image. It lies on the disk that is no part of an image."""
IMAGE = f"{WORK}/root.erofs"
# Goes into every key: a change of what the steps below do makes new images of old inputs.
_RECIPE_VERSION = 2
TOO_LARGE_EXIT = 65
# After each step: what it has left running ends, and what it has put into /tmp goes where it is kept.
REST = f"""
kill -KILL -1 2> /dev/null || :
rm -rf {WORK}/tmp
if [ -n "$(ls -A /tmp)" ]; then cp -a /tmp {WORK}/tmp; fi
"""
UNREST = f"""
if [ -e {WORK}/tmp ]; then cp -a {WORK}/tmp/. /tmp/; fi
"""
_MOST_DROPPED = 100
_MOST_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a build."""

    name: str
    text: str
    """What it is, in the user's words."""
    script: str
    """For `bash -e`, as root in /."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What the packer said; the guest's word."""

    size: int
    sha256: str
    dropped: list[Dropped]
    dropped_count: int


def build_key(request: TemplateBuild, *, workspace: str, parent_digest: str, network: str) -> str:
    """Equal for equal images. The workspace is part of it: nobody starts from what another has made."""
    inputs = request.model_dump(
        include={"files", "apt", "pip", "run", "env", "start", "ready"}, mode="json", by_alias=True
    )
    if request.image is not None:
        # One that is not pinned has no key that others could find before it is fetched.
        inputs["image"] = request.image.digest or request.image.reference
    inputs["files"] = sorted(inputs["files"], key=lambda file: file["path"])
    parts = {"version": _RECIPE_VERSION, "workspace": workspace, "parent": parent_digest, "inputs": inputs}
    if any(_sees_the_network(step) for step in steps_of(request)):
        parts["network"] = network
    return _digest(parts)


def layer_keys(request: TemplateBuild, *, workspace: str, parent_digest: str, network: str) -> list[str]:
    """One for each of `steps_of`: equal where it and all steps before it did the same, with the same at hand."""
    # What is kept of a sandbox is taken up by one of its size.
    shape = [request.cpu, request.memory_mib, request.disk_mib]
    begun = {"version": _RECIPE_VERSION, "workspace": workspace, "parent": parent_digest, "shape": shape}
    key = _digest({**begun, "env": request.env})
    keys = []
    for step in steps_of(request):
        seen = network if _sees_the_network(step) else ""
        key = _digest({"before": key, "name": step.name, "script": step.script, "network": seen})
        keys.append(key)
    return keys


def _sees_the_network(step: Step) -> bool:
    return step.name != "files"


def _digest(parts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def steps_of(request: TemplateBuild) -> list[Step]:
    """What changes the root, in order: files, apt, pip, run. Of an image of others: none of these."""
    steps: list[Step] = []
    if request.image is not None:
        return steps
    if request.files or request.env:
        text = f"{len(request.files)} files, {len(request.env)} variables"
        steps.append(Step(name="files", text=text, script=_files_script(request)))
    if request.apt:
        names = shlex.join(request.apt)
        install = f"apt-get install -y --no-install-recommends -- {names}"
        script = f"export DEBIAN_FRONTEND=noninteractive\napt-get update\n{install}\napt-get clean"
        steps.append(Step(name="apt", text=f"apt-get install {' '.join(request.apt)}", script=script))
    if request.pip:
        install = "python3 -m pip install --no-cache-dir --root-user-action=ignore"
        script = f"{install} -- {shlex.join(request.pip)}"
        steps.append(Step(name="pip", text=f"pip install {' '.join(request.pip)}", script=script))
    for number, command in enumerate(request.run, 1):
        steps.append(Step(name=f"run {number}", text=command, script=command))
    return steps


def steps_shown(request: TemplateBuild) -> list[BuildStep]:
    """All steps, those of cpuOS itself included."""
    own = [
        ("pack", "make the image"),
        ("store", "keep the image on the node"),
        ("try", "start a sandbox from it"),
    ]
    first = [(step.name, step.text) for step in steps_of(request)]
    if request.image is not None:
        first = [("fetch", request.image.reference or "an archive"), ("unpack", "its layers"), ("fit", "for sandboxes")]
    shown = [*first, *own]
    return [BuildStep(name=name, text=_short(text)) for name, text in shown]


def pack_step(loader: str, program: str, *, max_mib: int, root: str = "") -> Step:
    """Tidies the root, or the folder that is to be one, and makes an image of it, in the build sandbox itself: the
    host never reads its tree."""
    folders = "|".join(folder.strip("/").replace(".", "\\.") for folder in UNKEPT_FOLDERS)
    pattern = f"^({folders}|var/log/cpuos)/.*"
    excluded = " ".join(f"--exclude={root}{folder}" for folder in UNKEPT_FOLDERS)
    script = f"""
cd {WORK}
# What the steps left running would change the root while it is read.
kill -KILL -1 2> /dev/null || :
used=$(du -s --apparent-size --block-size=1M {excluded} {root}/ | cut -f1)
if [ "$used" -gt {max_mib} ]; then
  echo "the root holds $used MiB, and a template may have {max_mib} MiB" >&2
  exit {TOO_LARGE_EXIT}
fi
report() {{ sed 's# {root}/# /#' | head -c 60000 >> dropped; }}
rm -rf dropped changed root.erofs
: > dropped
# Sockets and devices mean nothing in another sandbox.
find {root}/ -xdev \\( -type b -o -type c -o -type s \\) -printf '%y %p\\0' -delete 2> /dev/null \\
  | tr '\\n\\0' '?\\n' | report
# The image holds no extended attributes. The parent has none, so only what changed since can have some.
find {root}/ -xdev -type f -newerct "@$(stat -c %Y started)" -print0 > changed 2> /dev/null || :
tar --null --no-recursion --files-from=changed --xattrs --xattrs-include='*' -cPf - 2> /dev/null \\
  | tar --xattrs --full-time -tvvPf - 2> /dev/null \\
  | awk '/^  x: /{{ print "x " $3 " " name }} !/^  /{{ sub(/^([^ ]+ +){{5}}/, ""); name = $0 }}' | report
# What a file capability let a program do, root's rights do too, and users have those in a sandbox anyway.
if command -v getcap > /dev/null; then
  xargs -0 -r -a changed getcap -- 2> /dev/null | while IFS= read -r line; do
    if chmod u+s -- "${{line% *}}" 2> /dev/null; then echo "x security.capability ${{line% *}}"; fi
  done | report
fi
rm -rf {root}/var/lib/apt/lists/* {root}/var/cache/apt/*.bin {root}/var/lib/dbus/machine-id {root}/etc/ssh/ssh_host_*
rm -f {root}/etc/machine-id
: > {root}/etc/machine-id
./{loader} --library-path . ./{program} -x-1 -E noinline_data --preserve-mtime --quiet \\
  {shlex.quote("--exclude-regex=" + pattern)} root.erofs {root}/ >&2
stat -c %s root.erofs
sha256sum root.erofs | cut -d' ' -f1
wc -l < dropped
head -n {_MOST_DROPPED} dropped
"""
    return Step(name="pack", text="make the image", script=script)


def read_packed(output: bytes) -> Packed | None:
    """The last lines of the packer's output; None when they are not what it writes."""
    lines = output.decode(errors="replace").split("\n")
    try:
        size, digest, count = int(lines[0]), lines[1], int(lines[2])
    except (IndexError, ValueError):
        return None
    if size <= 0 or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        return None
    told = [dropped for line in lines[3 : 3 + _MOST_DROPPED] if (dropped := _dropped(line)) is not None]
    return Packed(size=size, sha256=digest, dropped=told, dropped_count=max(count, len(told)))


def _files_script(request: TemplateBuild) -> str:
    lines = []
    if request.files:
        sums = "".join(_sum_line(file) for file in sorted(request.files, key=lambda file: file.path))
        lines.append(f"printf %s {shlex.quote(sums)} | sha256sum --check --strict --quiet")
        for file in sorted(request.files, key=lambda file: file.path):
            name = shlex.quote(file.path)
            lines.append(f"chown -h root:root {name} && chmod {file.mode:o} {name}")
    if request.env:
        pairs = "".join(f'{name}="{value}"\n' for name, value in request.env.items())
        lines.append(f"printf %s {shlex.quote(pairs)} >> /etc/environment")
    return "\n".join(lines)


def _sum_line(file: BuildFile) -> str:
    """As `sha256sum --check` reads it: a line with a backslash in its name begins with one."""
    if "\\" not in file.path:
        return f"{file.sha256}  {file.path}\n"
    return "\\" + file.sha256 + "  " + file.path.replace("\\", "\\\\") + "\n"


def _short(command: str) -> str:
    line = command.strip().split("\n")[0]
    whole = line == command.strip() and len(line) <= _MOST_TEXT
    return line if whole else f"{line[:_MOST_TEXT]} …"


def _dropped(line: str) -> Dropped | None:
    kind, _, rest = line.partition(" ")
    if kind in ("b", "c", "s") and rest:
        return Dropped(path=rest[:1024], what="socket" if kind == "s" else "device")
    attribute, _, path = rest.partition(" ")
    if kind == "x" and path:
        return Dropped(path=path[:1024], what=attribute[:255])
    return None
