"""Templates: which sources they are built from, what may be carried in, and the stamp of the image."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from cpuos.errors import SetupRequired
from cpuos.settings import load_settings
from cpuos.setup.apt_sources import acquire_options, distribution_sources, without_credentials
from cpuos.setup.erofs import stamp_image
from cpuos.setup.host import Host
from cpuos.setup.templates import TEMPLATES, Template, choose_templates, template_is_current


def write_sources(etc: Path) -> None:
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "sources.list").write_text(
        "# deb http://old.example/debian bookworm main\n"
        "deb [signed-by=/usr/share/keyrings/d.gpg arch=amd64] http://u:p@mirror.example/debian bookworm main contrib\n"
        "deb-src http://mirror.example/debian bookworm main\n"
    )
    (etc / "sources.list.d" / "vendor.list").write_text("deb https://vendor.example/apt cloud-sdk-bookworm main\n")
    (etc / "sources.list.d" / "docker.list").write_text("deb https://docker.example/debian bookworm stable\n")
    (etc / "sources.list.d" / "d.sources").write_text(
        "Types: deb deb-src\n# a remark\nURIs: http://a.example/debian http://b.example/debian\n"
        "Suites: bookworm-security bookworm-backports\nComponents: main\nSigned-By:\n -----BEGIN KEY-----\n .\n abc\n\n"
        "Types: deb\nURIs: http://c.example\nSuites: bookworm\nComponents: main\nEnabled: no\n"
    )


def test_only_the_distribution_is_taken(tmp_path: Path) -> None:
    write_sources(tmp_path)
    first, second = distribution_sources("bookworm", etc=tmp_path)
    assert (first.uris, first.suites, first.components) == (
        ("http://u:p@mirror.example/debian",),
        ("bookworm",),
        ("main",),
    )
    assert first.signed_by == "/usr/share/keyrings/d.gpg"
    assert second.suites == ("bookworm-security",)
    assert "BEGIN KEY" in second.signed_by
    assert "URIs: http://a.example/debian http://b.example/debian\n" in str(second)
    assert distribution_sources("noble", etc=tmp_path) == []
    assert distribution_sources("noble", etc=tmp_path / "none") == []


def test_of_ubuntu_the_two_parts_are_taken_that_hold_what_set_up_needs(tmp_path: Path) -> None:
    """As its installer writes the file; skopeo, umoci, mmdebstrap and erofs-utils are in universe there."""
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("# Ubuntu sources have moved to /etc/apt/sources.list.d/ubuntu.sources\n")
    (tmp_path / "sources.list.d" / "ubuntu.sources").write_text(
        "# See the manual\n"
        "Types: deb\nURIs: http://mirror.example/ubuntu/\nSuites: noble noble-updates noble-backports\n"
        "Components: main restricted universe multiverse\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"
        "\n## Ubuntu security updates.\n"
        "Types: deb\nURIs: http://security.example/ubuntu/\nSuites: noble-security\n"
        "Components: main restricted universe multiverse\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n"
    )
    found = distribution_sources("noble", etc=tmp_path)
    assert [source.suites for source in found] == [("noble", "noble-updates"), ("noble-security",)]
    assert {source.components for source in found} == {("main", "universe")}
    assert {source.signed_by for source in found} == {"/usr/share/keyrings/ubuntu-archive-keyring.gpg"}


@pytest.mark.parametrize(
    ("uri", "clean"),
    [
        ("http://u:p@mirror.example/debian", "http://mirror.example/debian"),
        ("https://token@mirror.example/x@y", "https://mirror.example/x@y"),
        ("http://mirror.example/a@b", "http://mirror.example/a@b"),
    ],
)
def test_credentials_are_cut(uri: str, clean: str) -> None:
    assert without_credentials(uri) == clean


def test_how_to_download_is_carried_into_the_build() -> None:
    dump = """
Acquire "";
Acquire::Check-Valid-Until "false";
Acquire::http::Proxy "http://proxy.example:3128";
Acquire::IndexTargets::deb::DEP-11::MetaKey "x";
Acquire::Languages:: "none";
Acquire::https::CaInfo "";
DPkg::Post-Invoke:: "rm -rf /";
"""
    assert acquire_options(dump) == [
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy "http://proxy.example:3128";',
    ]


def test_templates_hold_what_integrations_need() -> None:
    base = {template.name: set(template.packages) for template in TEMPLATES}["base"]
    python = {template.name: set(template.packages) for template in TEMPLATES}["python"]
    assert base < python
    assert {"bash", "sudo", "git", "curl", "ripgrep", "jq", "sqlite3", "adduser", "findutils", "grep"} <= base
    assert {"python-is-python3", "python3-pip", "python3-venv", "python3-pandas", "python3-matplotlib"} <= python


def test_the_computer_has_what_is_promised_of_it() -> None:
    computer = {template.name: template for template in TEMPLATES}["computer"]
    promised = {"libreoffice-calc-nogui", "pandoc", "poppler-utils", "qpdf", "ghostscript", "tesseract-ocr", "ffmpeg"}
    promised |= {"imagemagick", "libvips-tools", "ripgrep", "jq", "sqlite3", "sudo", "python3-pandas", "python3-numpy"}
    assert promised | {"python3-matplotlib", "python3-openpyxl"} <= set(computer.packages)
    assert (computer.wheels, computer.program) == ("computer.txt", "typst")


@pytest.mark.parametrize("template", [one for one in TEMPLATES if one.wheels], ids=lambda one: one.name)
def test_wheels_are_pinned_by_version_and_digest(template: Template) -> None:
    lines = resources.files("cpuos.setup").joinpath(f"wheels/{template.wheels}").read_text().splitlines()
    named = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    assert named
    for number in named:
        assert "==" in lines[number]
        assert lines[number + 1].strip().startswith("--hash=sha256:")


def test_templates_that_only_some_need_are_built_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*names: str, all_of_them: bool = False) -> list[str]:
        return [template.name for template in choose_templates(names, all_of_them=all_of_them)]

    monkeypatch.setattr("cpuos.setup.templates._distribution", lambda: {"ID": "debian"})
    assert named() == ["python", "base"]
    assert named("devbox") == ["python", "base", "devbox"]
    assert named(all_of_them=True) == ["python", "base", "node", "browser", "computer", "devbox"]
    with pytest.raises(SetupRequired, match="cannot build template: ruby"):
        named("ruby")
    monkeypatch.setattr("cpuos.setup.templates._distribution", lambda: {"ID": "ubuntu"})
    assert named(all_of_them=True) == ["python", "base", "node", "computer", "devbox"]
    with pytest.raises(SetupRequired, match="packages of debian, and this is ubuntu"):
        named("browser")


@pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="needs erofs-utils")
def test_equal_trees_give_equal_images(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("content")
    images = []
    for number in range(2):
        image = tmp_path / f"{number}.erofs"
        options = ["-x-1", "-E", "noinline_data", "--preserve-mtime", "-U", "ef82bd5b-0a9d-5b98-bfe1-0e8241d66316"]
        subprocess.run(["mkfs.erofs", *options, "--quiet", image, tree], check=True, capture_output=True)
        stamp_image(image, 1735689600 + number)
        stamp_image(image, 1735689600)
        images.append(image.read_bytes())
        assert struct.unpack_from("<Q", images[-1], 1024 + 24) == (1735689600,)
    assert images[0] == images[1]
    assert "checksum" not in fsck(tmp_path / "1.erofs")
    damaged = bytearray(images[0])
    damaged[1024 + 60] ^= 0xFF
    (tmp_path / "0.erofs").write_bytes(damaged)
    assert "failed to verify superblock checksum" in fsck(tmp_path / "0.erofs")


def fsck(image: Path) -> str:
    # Its exit status is 0 for a wrong checksum too.
    return subprocess.run(["fsck.erofs", image], capture_output=True, text=True).stderr


def test_only_an_image_is_stamped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(8192))
    with pytest.raises(SetupRequired, match="not an EROFS image"):
        stamp_image(tmp_path / "x", 0)


def test_what_the_operator_had_carried_in_stays(tmp_path: Path) -> None:
    from cpuos.setup import templates

    plain = Host(load_settings(data_dir=tmp_path), log=io.StringIO())
    asking = Host(load_settings(data_dir=tmp_path, template_host_ca=True), log=io.StringIO())
    template = TEMPLATES[0]
    folder = tmp_path / "templates" / template.name
    folder.mkdir(parents=True)
    (folder / "root.erofs").write_bytes(b"image")
    manifest = {"definition": templates._definition(template), "size": 5, "carried": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert template_is_current(plain, template)
    assert not template_is_current(asking, template)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "carried": ["host certificates"]}))
    assert template_is_current(plain, template)
    assert template_is_current(asking, template)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "definition": "other"}))
    assert not template_is_current(plain, template)
    (folder / "manifest.json").write_text("[]")
    assert not template_is_current(plain, template)
