"""Images of others: the programs that fetch, unpack and fit one in a build sandbox, and what is believed of it after.

An image is unpacked below `ROOT` of the build sandbox, never on the host; what is wrong with it, or evil, is a failed
step there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpuos.server.templates.recipe import TOO_LARGE_EXIT, WORK, Step
from cpuos.types.template import ARCHIVE, CREDENTIALS, ImageInfo, ImageSource

__all__ = [
    "CONFIG",
    "FETCHED",
    "FITTED",
    "MAX_CONFIG",
    "ROOT",
    "Imported",
    "fetch_step",
    "fit_step",
    "read_fitted",
    "read_imported",
    "unpack_step",
]

ROOT = "/var/tmp/image"
FETCHED = f"{WORK}/fetched"
FITTED = f"{WORK}/fitted"
CONFIG = f"{WORK}/config.json"
MAX_CONFIG = 1 << 20
MAX_ENTRIES = 1_000_000
_MAX_ENVIRONMENT = 200
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHELLS = frozenset({"sh", "bash", "ash", "dash", "zsh"})
_USER = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an image says of itself, and how it is used here."""

    info: ImageInfo
    env: dict[str, str]
    start: str | None
    """What it is made to run."""


def fetch_step(source: ImageSource, *, loader: str) -> Step:
    """`loader` starts the host's programs, which lie in the work folder, in whatever root."""
    return Step(name="fetch", text=source.reference or "an archive", script=_fetch_script(source, loader=loader))


def unpack_step(*, loader: str, max_mib: int) -> Step:
    return Step(name="unpack", text="its layers", script=_unpack_script(loader, max_mib=max_mib))


def fit_step(env: Mapping[str, str]) -> Step:
    """`env` holds in all that sandboxes of it run."""
    pairs = "".join(f'{name}="{value}"\n' for name, value in env.items())
    return Step(name="fit", text="for sandboxes", script=f"{_FIT}\nprintf %s {shlex.quote(pairs)} >> etc/environment\n")


def read_fitted(imported: Imported, told: bytes) -> Imported:
    """What became of the user that it is to run as, and of its shell."""
    words = told.decode(errors="replace").split()
    user = words[0] if words and _USER.fullmatch(words[0]) else "root"
    changes = {"user": user, "shell": "bash" if "bash" in words[1:] else "sh"}
    return replace(imported, info=imported.info.model_copy(update=changes))


def read_imported(source: ImageSource, *, fetched: bytes, config: bytes) -> Imported | None:
    """The guest's word for it; None when it makes no sense."""
    digest = fetched.decode(errors="replace").strip()
    try:
        whole = json.loads(config)
        made = whole.get("config") or {}
        entrypoint, command = _words(made.get("Entrypoint")), _words(made.get("Cmd"))
        folder = str(made.get("WorkingDir") or "/")
        pairs = [str(pair).partition("=") for pair in _words(made.get("Env"))]
        architecture = str(whole.get("architecture") or "")
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    if _DIGEST.fullmatch(digest) is None or _CONTROL.search(folder) or not folder.startswith("/"):
        return None
    env = {name: value for name, _, value in pairs if _is_variable(name, value)}
    info = ImageInfo(
        reference=source.reference or "",
        digest=digest,
        architecture=architecture[:64],
        entrypoint=entrypoint,
        command=command,
        folder=folder[:1024],
        left_out=[f"env {name[:128]}" for name, _, value in pairs if not _is_variable(name, value)][:100],
    )
    plain_shell = not entrypoint and len(command) == 1 and command[0].rpartition("/")[2] in _SHELLS
    words = [] if plain_shell else [*entrypoint, *command]
    start = f"exec {shlex.join(words)}" if words else None
    return Imported(info=info, env=dict(list(env.items())[:_MAX_ENVIRONMENT]), start=start)


def _words(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > 1000:
        raise ValueError("not a list of words")
    return [str(word)[:8192] for word in value]


def _is_variable(name: str, value: str) -> bool:
    return _NAME.fullmatch(name) is not None and not _CONTROL.search(value) and len(value) <= 4096


def _fetch_script(source: ImageSource, *, loader: str) -> str:
    read, copied = "--no-creds", "--src-no-creds"
    if source.credentials:
        read = copied = f"--authfile {CREDENTIALS}"
    if source.insecure:
        read, copied = f"{read} --tls-verify=false", f"{copied} --src-tls-verify=false"
    if source.archive is not None:
        read = copied = ""
        find = f"echo '{source.archive.sha256}  {ARCHIVE}' | sha256sum --check --strict --quiet\n{_FIND}"
        pinned = "$source"
    else:
        # With a digest the tag says nothing more.
        named = source.reference if source.digest is None else f"{source.repository}@{source.digest}"
        find = f"source=docker://{named}"
        pinned = f"docker://{source.repository}@$digest"
    return f"""
cd {WORK}
rm -rf layout fetching {FETCHED} && mkdir fetching
trap 'rm -rf {CREDENTIALS} {ARCHIVE} fetching' EXIT
skopeo() {{ ./{loader} --library-path . ./skopeo --insecure-policy --override-os linux --tmpdir {WORK}/fetching "$@"; }}
{find}
skopeo inspect --retry-times 3 --raw {read} "$source" > manifest
digest=sha256:$(sha256sum manifest | cut -d' ' -f1)
echo "$digest"
skopeo copy --quiet --retry-times 3 --multi-arch system {copied} "{pinned}" oci:layout:image
skopeo inspect --config oci:layout:image > {CONFIG}
echo "$digest" > {FETCHED}
"""


_FIND = f"""
listed=$(tar -tf {ARCHIVE} | head -n 100000)
if printf '%s\\n' "$listed" | grep -qxE '(\\./)?oci-layout'; then
  source=oci-archive:{ARCHIVE}
elif printf '%s\\n' "$listed" | grep -qxE '(\\./)?manifest\\.json'; then
  source=docker-archive:{ARCHIVE}
else
  echo "this is neither an OCI layout nor what docker save writes" >&2
  exit 1
fi
"""


# Entries and bytes of a tar stream, by its headers; it stops where they are surely too many.
_COUNT = f"""
my ($count, $size, $block) = (0, 0, "");
while (read(STDIN, $block, 512) == 512) {{
  next if $block =~ /^\\0*$/;
  my $field = substr($block, 124, 12);
  my $bytes = ord($field) & 0x80 ? unpack("Q>", substr($field, 4)) : oct($field =~ s/[^0-7]//gr);
  $count += 1;
  $size += $bytes;
  last if $count > {MAX_ENTRIES} || $size > $ARGV[0];
  for (my $left = ($bytes + 511) & ~511; $left > 0;) {{
    my $got = read(STDIN, $block, $left < 1048576 ? $left : 1048576) or last;
    $left -= $got;
  }}
}}
print "$count $size\\n";
"""


def _unpack_script(loader: str, *, max_mib: int) -> str:
    return f"""
cd {WORK}
rm -rf {ROOT} layer-names
manifest=$(jq -er '.manifests[0].digest' layout/index.json)
layers=$(jq -er '.layers[].digest' "layout/blobs/${{manifest/:/\\/}}")
if jq -er '.layers[].mediaType' "layout/blobs/${{manifest/:/\\/}}" | grep -q zstd; then
  echo "its layers are packed by zstd, and only gzip can be unpacked" >&2
  exit 1
fi
entries=0 size=0
for layer in $layers; do
  # What it would take unpacked is known before a byte of it is.
  blob=layout/blobs/${{layer/:/\\/}}
  read -r more bytes < <(gzip -dcf "$blob" 2> /dev/null | perl -e {shlex.quote(_COUNT)} {max_mib << 20})
  entries=$((entries + more)) size=$((size + bytes))
  if [ "$entries" -gt {MAX_ENTRIES} ]; then
    echo "its layers hold more than {MAX_ENTRIES} files" >&2
    exit {TOO_LARGE_EXIT}
  fi
  if [ "$size" -gt {max_mib << 20} ]; then
    echo "its layers hold more than the {max_mib} MiB that a template may have" >&2
    exit {TOO_LARGE_EXIT}
  fi
done
echo "$entries files, $((size >> 20)) MiB"
./{loader} --library-path . ./umoci raw unpack --image layout:image {ROOT}
rm -rf layout
"""


_FIT = f"""
cd {ROOT}
for place in etc etc/passwd etc/group etc/environment var home; do
  if [ -L "$place" ]; then echo "/$place of the image is a link, which no sandbox can have" >&2; exit 1; fi
done
if ! [ -e bin/sh ] && ! [ -L bin/sh ]; then
  echo "the image has no /bin/sh: nothing could be run in a sandbox of it" >&2
  exit 1
fi
install -d -m 0755 etc var var/log home
for place in workspace tmp proc sys dev .cpuos var/log/cpuos home/user; do
  if [ -L "$place" ] || ! [ -d "$place" ]; then rm -rf "$place"; mkdir -m 0755 "$place"; fi
done
chmod 1777 tmp
for name in resolv.conf hosts hostname; do rm -rf "etc/$name"; cp "/etc/$name" "etc/$name"; done
shell=/bin/sh
if [ -x bin/bash ]; then shell=/bin/bash; fi
[ -s etc/passwd ] || echo "root:x:0:0:root:/root:$shell" > etc/passwd
[ -s etc/group ] || echo 'root:x:0:' > etc/group
grep -q '^user:' etc/passwd || echo "user:x:1000:1000::/home/user:$shell" >> etc/passwd
grep -qE '^[^:]*:[^:]*:1000:' etc/group || echo 'user:x:1000:' >> etc/group
owner=$(awk -F: '$1 == "user" {{ print $3 ":" $4 }}' etc/passwd)
chown "$owner" home/user workspace
if [ -x usr/bin/sudo ] && [ -d etc/sudoers.d ]; then
  cp /etc/sudoers.d/cpuos etc/sudoers.d/cpuos
fi
# Whom it runs as: a name of its own, or a number, which is given one.
wanted=$(jq -r '.config.User // ""' {CONFIG})
name=${{wanted%%:*}}
group=${{wanted#*:}}
case $name in
  '') name=root ;;
  *[!0-9]*)
    if ! awk -F: -v name="$name" '$1 == name {{ found = 1 }} END {{ exit !found }}' etc/passwd; then
      echo "the image is to run as $name, whom its /etc/passwd does not know" >&2
      exit 1
    fi ;;
  *)
    known=$(awk -F: -v id="$name" '$3 == id {{ print $1; exit }}' etc/passwd)
    if [ -z "$known" ]; then
      case $group in '' | *[!0-9]*) group=$name ;; esac
      known=uid-$name
      echo "$known:x:$name:$group::/:$shell" >> etc/passwd
    fi
    name=$known ;;
esac
jq -r '.config.WorkingDir // "/"' {CONFIG} | {{
  read -r folder
  case $folder in /*..*) ;; /?*) mkdir -p ".$folder" 2> /dev/null || : ;; esac
}}
echo "$name $(if [ -x bin/bash ]; then echo bash; fi)" > {FITTED}
"""
