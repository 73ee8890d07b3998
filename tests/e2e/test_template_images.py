"""Templates of OCI and Docker images, from files of the caller: what becomes of a good one, and of an evil one."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_templates import SMALL, images

from cpuos import Client, CpuosError, Sandbox, Template
from cpuos.testing.instance import Instance
from cpuos.testing.waiting import wait_until
from oci_images import base_layer, entry, expected_tree, layer, write_docker_archive, write_layout

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(240)]
SIZE: dict[str, Any] = {"memory": "512MiB", "disk": "1GiB", "cpu": 1}
LINK, HARD, CHAR, BLOCK = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE
CAPABLE = {"pax_headers": {"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00 \x00\x00" + "\x00" * 12}}
# What a sandbox has of its own, and what is written to make an image fit for one.
OWN = {"/etc/passwd", "/etc/group", "/etc/environment", "/etc/resolv.conf", "/etc/hosts", "/etc/hostname"}
OWN |= {"/etc/machine-id", "/home", "/home/user", "/workspace", "/tmp", "/proc", "/sys", "/dev", "/.cpuos", "/var"}
OWN |= {"/var/log", "/var/log/cpuos", "/", "/etc"}
FIND = r"find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /workspace -o -path /.cpuos \)"
LISTED = rf"{FIND} -prune -o -printf '%y\t%m\t%U\t%G\t%l\t%p\n'"
SUMS = rf"{FIND} -prune -o -type f -print0 | xargs -0 sha256sum"


@pytest.fixture(scope="module")
def small() -> bytes:
    return base_layer()


@pytest.fixture(autouse=True)
def _nothing_is_left(instance: Instance, client: Client) -> Iterator[None]:
    yield
    for template in Template.list(client=client):
        if template.built:
            Template.delete(template.name, client=client)
    assert images(instance) == []
    wait_until(lambda: Sandbox.list(client=client) == [])


def sh(sandbox: Sandbox, text: str) -> str:
    done = sandbox.exec(["/bin/sh", "-c", text], user="root", cwd="/")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def tree_of(sandbox: Sandbox) -> dict[str, tuple[Any, ...]]:
    sums = {}
    for line in sh(sandbox, SUMS).splitlines():
        digest, _, path = line.partition("  ")
        sums[path] = digest
    tree = {}
    for line in sh(sandbox, LISTED).splitlines():
        kind, mode, user, group, target, path = line.split("\t")
        content = target if kind == "l" else sums.get(path, "")
        tree[path] = (kind, int(mode, 8), int(user), int(group), content)
    return tree


def manifold(small: bytes) -> list[bytes]:
    long = "d" * 120
    second = [
        entry("opt"),
        entry("opt/keep", b"kept\n", mode=0o640, uid=500, gid=500),
        entry("opt/gone", b"to be removed\n"),
        entry("opt/folder"),
        entry("opt/folder/a", b"a\n"),
        entry("opt/folder/inner"),
        entry("opt/folder/inner/b", b"b\n"),
        entry("opt/opaque"),
        entry("opt/opaque/old", b"old\n"),
        entry("opt/was-file", b"x\n"),
        entry("opt/was-folder"),
        entry("opt/was-folder/x", b"x\n"),
        entry("opt/hard", type=HARD, linkname="opt/keep"),
        entry("opt/link", type=LINK, linkname="keep"),
        entry("opt/absolute", type=LINK, linkname="/opt/keep"),
        entry("opt/rooted", b"#!/bin/sh\n", mode=0o4755),
        entry("opt/sticky", mode=0o1777),
        entry(f"opt/{long}"),
        entry(f"opt/{long}/{long}", b"long\n"),
        entry("opt/spaced name", b""),
        entry("opt/\u00fcml\u00e4ut", "\u00e4".encode()),
    ]
    third = [
        entry("opt/.wh.gone", b""),
        entry("opt/folder/.wh.inner", b""),
        entry("opt/opaque/new", b"new\n"),
        entry("opt/opaque/.wh..wh..opq", b""),
        entry("opt/was-file"),
        entry("opt/was-file/now", b"a folder\n"),
        entry("opt/.wh.was-folder", b""),
        entry("opt/was-folder", b"now a file\n"),
        entry("opt/keep", b"changed\n", mode=0o600),
        entry("opt/back", b"1\n"),
    ]
    fourth = [entry("opt/.wh.back", b""), entry("opt/gone", b"there again\n"), entry("opt/folder", mode=0o700)]
    return [small, layer(second), layer(third), layer(fourth)]


def test_layers_come_to_what_the_specification_says(instance, client, tmp_path, small):
    """File by file, against a reader of our own; and as an archive of the other kind it is the same."""
    layers = manifold(small)
    told: list[str] = []
    layout = write_layout(tmp_path / "layout", layers)
    built = Template.from_image(layout, name="tree", on_output=told.append, client=client, **SIZE)
    assert [line.split(":")[0] for line in told if line.startswith("== ")] == [
        f"== {name}" for name in ("fetch", "unpack", "fit", "pack", "store", "try")
    ]
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    assert built.image is not None
    assert (built.image.digest, built.image.shell) == (manifest, "sh")
    assert manifest in told, "the digest is shown"
    expected = {path: told for path, told in expected_tree(layers).items() if path not in OWN}
    with Sandbox.create("tree", client=client, **SMALL) as sandbox:
        found = {path: told for path, told in tree_of(sandbox).items() if path not in OWN}
        assert found == expected
        assert sh(sandbox, "id -u user") == "1000\n"

    told.clear()
    again = Template.from_image(layout, name="again", on_output=told.append, client=client, **SIZE)
    assert (again.digest, told) == (built.digest, []), "nothing ran"
    assert len(images(instance)) == 1

    saved = write_docker_archive(tmp_path / "saved.tar", layers)
    Template.from_image(saved, client=client, **SIZE)
    with Sandbox.create("saved", client=client, **SMALL) as sandbox:
        assert {path: told for path, told in tree_of(sandbox).items() if path not in OWN} == expected


def test_what_an_image_is_made_to_do(instance, client, tmp_path, small):
    script = 'id -un > said; pwd >> said; echo "$GREETING $MORE" >> said; exec sleep 1000'
    config = {
        "Env": ["GREETING=hello there", "PATH=/bin", "BROKEN=two\nlines"],
        "Entrypoint": ["/bin/sh", "-c"],
        "Cmd": [script],
        "User": "worker",
        "WorkingDir": "/srv",
    }
    source = write_layout(tmp_path / "service", [small], config=config)
    built = Template.from_image(source, env={"MORE": "and more"}, client=client, **SIZE)
    image = built.image
    assert image is not None
    assert (image.user, image.folder, image.entrypoint) == ("worker", "/srv", ["/bin/sh", "-c"])
    assert image.left_out == ["env BROKEN"]
    assert built.env == {"GREETING": "hello there", "PATH": "/bin", "MORE": "and more"}
    with Sandbox.create("service", client=client, **SMALL) as sandbox:
        wait_until(lambda: "more" in sandbox.exec(["cat", "/srv/said"]).stdout)
        assert sandbox.exec(["cat", "/srv/said"]).stdout == "worker\n/srv\nhello there and more\n"
    argv = [sys.executable, "-m", "cpuos.cli", "template", "import", str(source), "--name", "told", "--env"]
    done = subprocess.run([*argv, "MORE=and more"], env=instance.environment(), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("told\n", 0), done.stderr
    assert built.image.digest in done.stderr
    assert Template.get("told", client=client).digest == built.digest, "the same again"


def test_a_number_is_given_a_name_and_a_shell_is_not_started(client, tmp_path, small):
    config = {"User": "4321:8765", "Cmd": ["/bin/sh"]}
    built = Template.from_image(write_layout(tmp_path / "plain", [small], config=config), client=client, **SIZE)
    assert built.image is not None
    assert (built.image.user, built.start) == ("uid-4321", None)
    with Sandbox.create("plain", client=client, **SMALL) as sandbox:
        assert sandbox.exec(["id", "-u"], user="uid-4321").stdout == "4321\n"


def test_what_an_evil_image_tries(instance, client, tmp_path, small):
    """All within the root that it makes, and what cannot be in an image is told."""
    evil = [
        entry("opt"),
        entry("../../../../up", b"1"),
        entry("/rooted", b"2"),
        entry("opt/../../../around", b"3"),
        entry("through", type=LINK, linkname="/opt"),
        entry("through/written", b"4"),
        entry("out", type=LINK, linkname="../../../../../workspace"),
        entry("out/written", b"5"),
        entry("opt/memory", type=CHAR, devmajor=1, devminor=1),
        entry("opt/disk", type=BLOCK, devmajor=8, devminor=0),
        entry("opt/capable", b"#!/bin/sh\n", mode=0o755, **CAPABLE),
        entry("opt/marked", b"", **{"pax_headers": {"SCHILY.xattr.user.mark": "m"}}),
        entry("workspace"),
        entry("workspace/.cpuos-build"),
        entry("workspace/.cpuos-build/umoci", b"not the real one", mode=0o755),
        entry("proc"),
        entry("proc/self", b"mine"),
        entry("etc/hosts", type=LINK, linkname="/etc/shadow"),
    ]
    before = sorted(path.name for path in Path("/").iterdir())
    source = write_layout(tmp_path / "evil", [small, layer(evil)])
    built = Template.from_image(source, client=client, **SIZE)
    dropped = {(one.path, one.what) for one in built.dropped}
    assert {("/opt/memory", "device"), ("/opt/disk", "device")} <= dropped
    assert ("/opt/capable", "security.capability") in dropped
    with Sandbox.create("evil", client=client, **SMALL) as sandbox:
        tree = tree_of(sandbox)
        assert {"/up", "/rooted", "/around", "/opt/written"} <= set(tree)
        assert tree["/opt/capable"][1] == 0o4755
        assert "/opt/memory" not in tree
        assert tree["/etc/hosts"][0] == "f"
        assert sh(sandbox, "cat /proc/self/status").startswith("Name:")
    assert sorted(path.name for path in Path("/").iterdir()) == before


@pytest.mark.parametrize(
    ("kind", "step", "word"),
    [
        ("hard link", "unpack", "opt/stolen"),
        ("tampered", "fetch", ""),
        ("large", "unpack", "8192 MiB"),
        ("many", "unpack", "1000000 files"),
        ("no shell", "fit", "/bin/sh"),
        ("linked", "fit", "/etc of the image is a link"),
        ("stranger", "fit", "nobody-here"),
        ("garbage", "fetch", "neither an OCI layout"),
        ("cut", "fetch", ""),
    ],
)
def test_an_image_that_cannot_be_one_fails_where_it_shows(client, tmp_path, small, kind, step, word):
    folder = tmp_path / "x"
    source = folder
    match kind:
        case "hard link":
            stolen = entry("opt/stolen", type=HARD, linkname="../../../../../../workspace/.cpuos-build/umoci")
            write_layout(folder, [small, layer([entry("opt"), stolen])])
        case "tampered":
            write_layout(folder, [small])
            blob = max((folder / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
            blob.write_bytes(gzip.compress(layer([entry("other", b"1")])))
        case "large":
            # Nine GiB of zeros, of which the header tells; none of them has to be there for that.
            head = entry("zeros", b"", size=9 << 30)[0].tobuf(tarfile.GNU_FORMAT)
            write_layout(folder, [small, head + bytes(10240)])
        case "many":
            # The same thousand files again and again: what is packed separately unpacks to all of it.
            thousand = b"".join(entry(f"many/{number}", b"")[0].tobuf(tarfile.GNU_FORMAT) for number in range(1000))
            write_layout(folder, [small], packed=[gzip.compress(thousand) * 1001])
        case "no shell":
            write_layout(folder, [layer([entry("etc"), entry("etc/passwd", b"root:x:0:0::/:/x\n")])])
        case "linked":
            write_layout(folder, [layer([entry("etc", type=LINK, linkname="/workspace")])])
        case "stranger":
            write_layout(folder, [small], config={"User": "nobody-here"})
        case "garbage":
            source = tmp_path / "garbage.tar"
            with tarfile.open(source, "w") as archive:
                archive.addfile(entry("readme", b"x")[0], io.BytesIO(b"x"))
        case "cut":
            write_docker_archive(tmp_path / "whole.tar", [small])
            source = tmp_path / "cut.tar"
            source.write_bytes((tmp_path / "whole.tar").read_bytes()[: 1 << 20])
    with pytest.raises(CpuosError) as failed:
        Template.from_image(source, name="wrong", client=client, **SIZE)
    error = failed.value
    expected = "template_size" if kind in ("large", "many") else None
    assert error.code == ("limit_reached" if expected else "build_failed")
    assert error.details.get("limit") == expected
    if not expected:
        assert error.details["step"] == step
    assert word in str(error)


@pytest.mark.parametrize(
    ("source", "values", "word"),
    [
        ("alpine", {}, "HOST/NAME:TAG"),
        ("docker-daemon:alpine", {}, "HOST/NAME:TAG"),
        ("oci-archive:/etc/passwd", {}, "HOST/NAME:TAG"),
        ("docker://reg.example/x", {}, "HOST/NAME:TAG"),
        ("reg.example/x:y z", {}, "HOST/NAME:TAG"),
        ("reg.example/x@sha256:abc", {}, "HOST/NAME:TAG"),
        (Path("/none/such"), {}, "no such file"),
        (Path("/etc"), {}, "no OCI layout"),
        (Path("/etc/hostname"), {"insecure": True}, "for registries"),
    ],
)
def test_what_is_no_image_is_refused_at_once(client, source, values, word):
    with pytest.raises(CpuosError) as refused:
        Template.from_image(source, name="wrong", client=client, **values)
    assert word in str(refused.value)
    assert refused.value.status == 422
