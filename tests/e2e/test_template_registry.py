"""Images from a registry, which the build's sandbox asks under the workspace's network policy."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_network_packages import MIRROR, instance, mirror

from cpuos import CpuosError, Sandbox, Template
from cpuos.testing.sealed import SealedInstance, addresses
from oci_images import base_layer, entry, layer, write_layout

__all__ = ["instance", "mirror"]

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]
SIZE: dict[str, Any] = {"memory": "512MiB", "disk": "1GiB", "cpu": 1, "insecure": True}
REPOSITORY = f"{MIRROR}:8080/team/tool"


@pytest.fixture
def registry(mirror: Path) -> Iterator[Path]:
    yield mirror / "v2"
    shutil.rmtree(mirror / "v2", ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_templates(instance: SealedInstance) -> Iterator[None]:
    yield
    client = instance.client()
    for template in Template.list(client=client):
        if template.built:
            Template.delete(template.name, client=client)


def publish(registry: Path, folder: Path, *, tag: str, word: str) -> str:
    """Under the tag and under its digest; answers the digest."""
    made = write_layout(folder, [base_layer(), layer([entry("opt"), entry("opt/word", word.encode())])])
    place = registry / "team" / "tool"
    shutil.copytree(made / "blobs" / "sha256", place / "blobs", dirs_exist_ok=True)
    for blob in list((place / "blobs").iterdir()):
        if ":" not in blob.name:
            blob.rename(blob.with_name(f"sha256:{blob.name}"))
    digest = str(json.loads((made / "index.json").read_text())["manifests"][0]["digest"])
    (place / "manifests").mkdir(exist_ok=True)
    for name in (tag, digest):
        shutil.copy(place / "blobs" / digest, place / "manifests" / name)
    return digest


def word_of(name: str, instance: SealedInstance) -> str:
    sandbox = Sandbox.create(name, client=instance.client(), memory="256MiB", disk="256MiB", cpu=1)
    with sandbox:
        return sandbox.exec(["cat", "/opt/word"]).stdout


@pytest.mark.slow
def test_a_tag_is_resolved_and_its_digest_recorded(sealed, instance, registry, tmp_path):
    client = instance.client()
    digest = publish(registry, tmp_path / "1", tag="1.0", word="one")
    sealed.clear()
    built = Template.from_image(f"{REPOSITORY}:1.0", client=client, **SIZE)
    assert {seen.server for seen in sealed.connections()} <= {addresses.MIRROR}
    assert built.image is not None
    assert (built.name, built.image.digest, built.image.reference) == ("tool", digest, f"{REPOSITORY}:1.0")
    assert word_of("tool", instance) == "one"
    # By its digest it is known without a look at the registry; by a tag, after one.
    sealed.clear()
    again = Template.from_image(f"{REPOSITORY}@{digest}", name="again", client=client, **SIZE)
    assert (again.digest, sealed.connections()) == (built.digest, [])
    told: list[str] = []
    again = Template.from_image(f"{REPOSITORY}:1.0", name="again", on_output=told.append, client=client, **SIZE)
    assert again.digest == built.digest
    assert digest in told
    assert not [line for line in told if "umoci" in line or "unpacking" in line]
    # Another image under the same tag is another template.
    newer = publish(registry, tmp_path / "2", tag="1.0", word="two")
    built = Template.from_image(f"{REPOSITORY}:1.0", client=client, **SIZE)
    assert built.image is not None
    assert built.image.digest == newer != digest
    assert word_of("tool", instance) == "two"


def test_a_registry_that_lies_is_not_believed(instance, registry, tmp_path):
    digest = publish(registry, tmp_path / "1", tag="1.0", word="one")
    manifest = registry / "team" / "tool" / "manifests" / digest
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(CpuosError) as failed:
        Template.from_image(f"{REPOSITORY}@{digest}", client=instance.client(), **SIZE)
    assert failed.value.details["step"] == "fetch"


@pytest.mark.slow
def test_what_opens_a_registry_is_nowhere_but_in_the_build(instance, registry, tmp_path):
    publish(registry, tmp_path / "1", tag="1.0", word="secret")
    password = hashlib.sha256(b"a password of this test").hexdigest()
    opens = base64.b64encode(f"me:{password}".encode()).decode()
    (registry / "authorization").write_text(f"Basic {opens}")
    client = instance.client()
    with pytest.raises(CpuosError) as failed:
        Template.from_image(f"{REPOSITORY}:1.0", client=client, **SIZE)
    assert failed.value.details["step"] == "fetch"
    with pytest.raises(CpuosError) as failed:
        Template.from_image(f"{REPOSITORY}:1.0", credentials=("me", "wrong"), client=client, **SIZE)
    assert failed.value.details["step"] == "fetch"
    told: list[str] = []
    Template.from_image(f"{REPOSITORY}:1.0", credentials=("me", password), on_output=told.append, client=client, **SIZE)
    with Sandbox.create("tool", client=client) as sandbox:
        assert sandbox.exec(["cat", "/opt/word"]).stdout == "secret"
    assert not [line for line in told if password in line or opens in line]
    kept = [path for path in instance.settings.state_dir.rglob("*") if path.is_file() and path.suffix != ".erofs"]
    kept += [path for path in instance.settings.log_dir.rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        content = path.read_bytes() if path.stat().st_size < 64 << 20 else b""
        assert password.encode() not in content, path
        assert opens.encode() not in content, path


def test_the_policy_holds_for_the_fetch(sealed, instance, registry, tmp_path):
    publish(registry, tmp_path / "1", tag="1.0", word="one")
    client = instance.client()
    client.network.update("off")
    sealed.clear()
    try:
        with pytest.raises(CpuosError) as failed:
            Template.from_image(f"{REPOSITORY}:1.0", client=client, **SIZE)
    finally:
        client.network.update("internet")
    assert failed.value.details["step"] == "fetch"
    assert sealed.connections() == []
