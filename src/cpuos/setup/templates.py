"""The templates that come with cpuOS: distribution packages by mmdebstrap, packed into reproducible EROFS images."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import time
import uuid
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any

from cpuos.errors import SetupRequired
from cpuos.setup.apt_sources import acquire_options, distribution_sources, without_credentials
from cpuos.setup.erofs import stamp_image
from cpuos.setup.host import Host
from cpuos.setup.trees import remove_tree
from cpuos.setup.uv import uv_path

__all__ = ["TEMPLATES", "Template", "build_template", "choose_templates", "template_is_current"]

EPOCH = 1735689600
"""What was made during a build is dated so (2025-01-01): equal packages give equal images."""

# What a manifest calls the things of the host that the operator had carried in.
_CERTIFICATES = "host certificates"
_MIRRORS = "host mirrors"
_BASE = """
    adduser bash bzip2 ca-certificates coreutils curl diffutils file findutils git grep gzip hostname iproute2
    iputils-ping jq less make nano netbase openssh-client patch procps psmisc ripgrep sed sqlite3 sudo tar tzdata unzip
    util-linux wget xz-utils zip
"""
_PYTHON = """
    python3 python-is-python3 python3-pip python3-venv python3-wheel python3-numpy python3-pandas python3-matplotlib
    python3-openpyxl fonts-dejavu-core
"""
_NODE = "nodejs npm"
# Ubuntu's package of this name only installs a snap.
_BROWSER = "chromium fonts-liberation fonts-noto-core fonts-noto-color-emoji"
# Without the windows of the office: it converts, and computes sheets.
_COMPUTER = """
    ffmpeg fonts-crosextra-carlito fonts-liberation fonts-noto-core ghostscript imagemagick libreoffice-calc-nogui
    libreoffice-impress-nogui libreoffice-writer-nogui libvips-tools pandoc poppler-utils python3-docx python3-pypdf
    qpdf tesseract-ocr tesseract-ocr-eng
"""
_DEVBOX = """
    build-essential cargo cmake gdb golang-go libssl-dev ninja-build pkg-config python3-dev rustc strace tmux vim-tiny
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """What a template is made of."""

    name: str
    summary: str
    packages: tuple[str, ...]
    download_mib: int
    """Beyond what the standard ones have fetched: a package is kept for all."""
    build_s: int
    disk_mib: int
    """Of the image, and of these packages."""
    standard: bool = True
    """Built by every set-up; else only when it is asked for."""
    distributions: tuple[str, ...] = ("debian", "ubuntu")
    """Those whose packages it can be made of."""
    wheels: str = ""
    """Name of a list in `wheels/`: what is in no distribution, by version and digest; ready-made files alone."""
    program: str = ""
    """A file of `wheels/` that becomes a command."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links, from and to."""


TEMPLATES = (
    Template(
        name="python",
        summary="Python 3 with pip, venv, NumPy, pandas, matplotlib, openpyxl, and all of base",
        packages=(*_BASE.split(), *_PYTHON.split()),
        download_mib=240,
        build_s=90,
        disk_mib=1700,
    ),
    Template(
        name="base",
        summary="a small Debian or Ubuntu with git, curl, sudo, ripgrep, jq, sqlite3",
        packages=tuple(_BASE.split()),
        download_mib=10,
        build_s=40,
        disk_mib=250,
    ),
    Template(
        name="node",
        summary="Node.js with npm, and all of base",
        packages=(*_BASE.split(), *_NODE.split()),
        download_mib=40,
        build_s=60,
        disk_mib=550,
        standard=False,
    ),
    Template(
        name="browser",
        summary="Chromium with fonts, Playwright for Python, and all of python",
        packages=(*_BASE.split(), *_PYTHON.split(), *_BROWSER.split()),
        download_mib=270,
        build_s=180,
        disk_mib=2500,
        standard=False,
        distributions=("debian",),
        wheels="browser.txt",
        # Where Playwright looks for what it calls the channel "chrome": it needs no browser of its own.
        links=(("/opt/google/chrome/chrome", "/usr/bin/chromium"),),
    ),
    Template(
        name="computer",
        summary="LibreOffice, pandoc, typst, PDF, image, sound and film tools, OCR, and all of python",
        packages=(*_BASE.split(), *_PYTHON.split(), *_COMPUTER.split()),
        download_mib=320,
        build_s=240,
        disk_mib=2900,
        standard=False,
        wheels="computer.txt",
        program="typst",
    ),
    Template(
        name="devbox",
        summary="compilers, CMake, Go, Rust, Node.js, Python, debuggers, and all of base",
        packages=(*_BASE.split(), *_PYTHON.split(), *_NODE.split(), *_DEVBOX.split()),
        download_mib=230,
        build_s=300,
        disk_mib=2800,
        standard=False,
    ),
)


def choose_templates(names: Collection[str] = (), *, all_of_them: bool = False) -> list[Template]:
    """The standard ones, and those of these names; or all that can be made here."""
    known = {template.name: template for template in TEMPLATES}
    distribution = _distribution().get("ID", "")
    for name in names:
        if name not in known:
            raise SetupRequired(
                f"cannot build template: {name}", f"there are {', '.join(sorted(known))}", hint="cpuos setup --help"
            )
        if distribution not in known[name].distributions:
            where = " or ".join(known[name].distributions)
            raise SetupRequired(
                f"cannot build template: {name}",
                f"it is made of packages of {where}, and this is {distribution or 'another system'}",
                hint="cpuos template build --help",
            )
    possible = {template.name for template in TEMPLATES if distribution in template.distributions}
    return [
        template
        for template in TEMPLATES
        if template.standard or template.name in names or (all_of_them and template.name in possible)
    ]


def template_is_current(host: Host, template: Template) -> bool:
    """Whether the image is there, was built from this definition, and holds what the operator wants carried in."""
    manifest = _read_manifest(host, template)
    image = host.settings.template_dir / template.name / "root.erofs"
    return (
        manifest.get("definition") == _definition(template)
        and _wanted(host) <= set(manifest.get("carried", []))
        and image.is_file()
        and image.stat().st_size == manifest.get("size")
    )


def build_template(host: Host, template: Template) -> None:
    """Build the image and its manifest, and put both in place at once; the earlier image stays until then."""
    work = host.settings.cache_dir / f"build-{template.name}"
    remove_tree(work)
    work.mkdir(parents=True)
    started = time.time()
    # What was once wanted stays wanted: a later set-up without the option does not undo it.
    carried = _wanted(host) | set(_read_manifest(host, template).get("carried", []))
    try:
        root, files = work / "root", work / "files"
        _lay_out_files(host, files, carried=carried)
        _make_root(host, template, root=root, files=files)
        packages = _read_packages(root)
        if template.wheels:
            _add_wheels(host, template, root=root)
        for place, target in template.links:
            (root / place.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / place.lstrip("/")).symlink_to(target)
        _date_new_files(root, since=started)
        image = work / "root.erofs"
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"cpuos-template:{template.name}")
        # No xattrs: gVisor refuses to execute files with file capabilities. No inline data: it cannot map such files.
        options = ["-x-1", "-E", "noinline_data", "--preserve-mtime", "-U", str(identity), "--quiet"]
        host.run(["mkfs.erofs", *options, image, root])
        stamp_image(image, EPOCH)
        manifest = {
            "name": template.name,
            "summary": template.summary,
            "digest": f"sha256:{_digest(image)}",
            "size": image.stat().st_size,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "distribution": _distribution()["PRETTY_NAME"],
            "architecture": platform.machine(),
            "packages": packages,
            "definition": _definition(template),
            "carried": sorted(carried),
        }
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        _put_in_place(work, host.settings.template_dir / template.name)
    finally:
        remove_tree(work)


def _make_root(host: Host, template: Template, *, root: Path, files: Path) -> None:
    debs = host.settings.cache_dir / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    codename = _distribution()["VERSION_CODENAME"]
    sources = files.parent / "build.sources"
    options = files.parent / "build.conf"
    sources.write_text("\n".join(str(source) for source in distribution_sources(codename)))
    carried = acquire_options(host.read(["apt-config", "dump"]) or "")
    options.write_text("\n".join([*carried, 'Acquire::Retries "5";']) + "\n")
    script = files.parent / "customize.sh"
    script.write_text(_resource("customize.sh"))
    quoted = {name: shlex.quote(str(path)) for name, path in (("debs", debs), ("script", script), ("files", files))}
    hooks = [
        # Hard links both ways: a package is downloaded once for all templates, and once for all tries.
        "--setup-hook=mkdir -p \"$1\"/var/cache/apt/archives; find {debs} -name '*.deb' -exec cp -l -t "
        '"$1"/var/cache/apt/archives {{}} +',
        '--essential-hook=cp -ln "$1"/var/cache/apt/archives/*.deb {debs}/',
        '--customize-hook=cp -ln "$1"/var/cache/apt/archives/*.deb {debs}/',
        '--customize-hook=sh {script} "$1" {files}',
    ]
    for auth in (Path("/etc/apt/auth.conf"), Path("/etc/apt/auth.conf.d")):
        if auth.exists():
            hooks.insert(0, f'--setup-hook=cp -r {auth} "$1"/etc/apt/')
    excluded = (
        "/usr/share/man/*",
        "/usr/share/info/*",
        "/usr/share/locale/*",
        "/usr/share/doc/*",
        "/usr/share/lintian/*",
    )
    dpkg_options = [f"--dpkgopt=path-exclude={pattern}" for pattern in excluded]
    dpkg_options += ["--dpkgopt=path-include=/usr/share/doc/*/copyright", "--dpkgopt=force-unsafe-io"]
    argv: list[str | Path] = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    argv += ["--skip=essential/unlink,download/empty", f"--include={','.join(template.packages)}"]
    argv += [f"--components={_components(codename)}", f"--aptopt={options}", *dpkg_options]
    argv += [hook.format(**quoted) for hook in hooks]
    argv += [codename, root]
    if sources.stat().st_size:
        argv.append(sources)
    # No SOURCE_DATE_EPOCH: with it, Python's .pyc files are made to hash their source at each import.
    environment = {"TMPDIR": str(files.parent)}

    def build() -> None:
        remove_tree(root)
        host.run(argv, env=environment)

    host.retry(build)


def _add_wheels(host: Host, template: Template, *, root: Path) -> None:
    """Unpack them for the root's own Python. Nothing of the root or of a wheel is run."""
    python = next(iter(sorted((root / "usr/bin").glob("python3.[0-9]*[0-9]")))).name
    target = root / "usr/local/lib" / python / "dist-packages"
    listed = root.parent / "wheels.txt"
    listed.write_text(_resource(f"wheels/{template.wheels}"))
    argv: list[str | Path] = [uv_path(host), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target"]
    argv += [target, "--python-version", python.removeprefix("python"), "--only-binary", ":all:"]
    argv += ["--link-mode", "copy", "-r", listed]
    host.run(argv, env={"UV_CACHE_DIR": str(host.settings.cache_dir / "uv-cache")}, network=True)
    remove_tree(target / "bin")  # its scripts name the interpreter of this machine
    (target / ".lock").unlink(missing_ok=True)
    if template.program:
        program = root / "usr/local/bin" / template.program
        program.write_text(_resource(f"wheels/{template.program}"))
        program.chmod(0o755)


def _lay_out_files(host: Host, files: Path, *, carried: set[str]) -> None:
    """The files laid over the root: public apt sources, and of the host only what the operator asked for."""
    apt = files / "etc" / "apt"
    apt.mkdir(parents=True)
    codename = _distribution()["VERSION_CODENAME"]
    if _MIRRORS in carried:
        sources = [
            dataclasses.replace(source, uris=tuple(without_credentials(uri) for uri in source.uris))
            for source in distribution_sources(codename)
        ]
        (apt / "sources.list.d").mkdir()
        (apt / "sources.list.d" / "host.sources").write_text("\n".join(str(source) for source in sources))
        pip = Path("/etc/pip.conf")
        if pip.is_file():
            (files / "etc" / "pip.conf").write_text(without_credentials(pip.read_text()))
    else:
        # Given no mirror and nothing to install, mmdebstrap writes the distribution's public sources.
        copy = f'--customize-hook=cp "$1"/etc/apt/sources.list {shlex.quote(str(apt))}'
        argv = [
            "mmdebstrap",
            "--mode=root",
            "--variant=custom",
            "--skip=update",
            f"--components={_components(codename)}",
        ]
        host.run([*argv, "--format=null", copy, codename])
    if _CERTIFICATES in carried:
        _write_host_certificates(files / "usr" / "local" / "share" / "ca-certificates")


def _write_host_certificates(folder: Path) -> None:
    bundle = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
    pattern = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
    try:
        certificates = pattern.findall(bundle.read_text(errors="replace"))
    except OSError as error:
        raise SetupRequired(
            f"cannot carry the host's certificates into the template: {bundle}",
            str(error),
            hint="unset CPUOS_TEMPLATE_HOST_CA",
        ) from error
    folder.mkdir(parents=True)
    for certificate in certificates:
        name = hashlib.sha256(certificate.encode()).hexdigest()[:16]
        (folder / f"host-{name}.crt").write_text(certificate + "\n")


def _read_packages(root: Path) -> dict[str, str]:
    """Package name to version, from the root's own dpkg database."""
    packages = {}
    for stanza in (root / "var/lib/dpkg/status").read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", stanza, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields["Version"]
    return packages


def _date_new_files(root: Path, *, since: float) -> None:
    """Give what the build itself wrote the time `EPOCH`; packaged files keep theirs, which Python's .pyc files name."""
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            if os.lstat(path).st_mtime >= since:
                os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
    os.utime(root, (EPOCH, EPOCH))


def _put_in_place(work: Path, target: Path) -> None:
    """Image first, manifest last: no manifest names an image that is not there. Running sandboxes keep theirs open."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("root.erofs", "manifest.json"):
        (work / name).chmod(0o644)
        (work / name).replace(target / name)


def _read_manifest(host: Host, template: Template) -> dict[str, Any]:
    try:
        manifest = json.loads((host.settings.template_dir / template.name / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _wanted(host: Host) -> set[str]:
    settings = host.settings
    wanted = {_CERTIFICATES: settings.template_host_ca, _MIRRORS: settings.template_host_mirrors}
    return {name for name, is_wanted in wanted.items() if is_wanted}


def _definition(template: Template) -> str:
    parts = [",".join(template.packages), _resource("customize.sh"), _distribution()["VERSION_CODENAME"]]
    parts += [_resource(f"wheels/{name}") for name in (template.wheels, template.program) if name]
    parts += [" ".join(link) for link in template.links]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _resource(name: str) -> str:
    return resources.files("cpuos.setup").joinpath(name).read_text()


def _distribution() -> dict[str, str]:
    return platform.freedesktop_os_release()


def _components(codename: str) -> str:
    return "main,universe" if platform.freedesktop_os_release().get("ID") == "ubuntu" else "main"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
