"""References of images, and what is believed of what an image says of itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cpuos.client._image import image_name, open_image
from cpuos.errors import InvalidRequest
from cpuos.server.templates.importing import fetch_step, fit_step, read_fitted, read_imported, unpack_step
from cpuos.server.templates.recipe import build_key
from cpuos.types.template import ARCHIVE, CREDENTIALS, ImageSource, TemplateBuild

DIGEST = "sha256:" + "a" * 64
SOURCE = ImageSource(reference="reg.example/team/tool:1")


@pytest.mark.parametrize(
    ("reference", "repository", "digest"),
    [
        ("docker.io/library/alpine:3.20", "docker.io/library/alpine", None),
        (f"reg.example/a/b@{DIGEST}", "reg.example/a/b", DIGEST),
        (f"reg.example:5000/a/b:tag@{DIGEST}", "reg.example:5000/a/b", DIGEST),
        ("localhost/x", "localhost/x", None),
        ("mirror:8080/x__y-z.w:T_1", "mirror:8080/x__y-z.w", None),
    ],
)
def test_a_reference_is_read(reference: str, repository: str, digest: str | None) -> None:
    source = ImageSource(reference=reference)
    assert (source.repository, source.digest) == (repository, digest)
    asked = fetch_step(source, loader="ld").script
    assert f"source=docker://{repository}@{digest}" in asked if digest else f"source=docker://{reference}" in asked


@pytest.mark.parametrize(
    "reference",
    [
        *("alpine", "library/alpine", "docker-daemon:alpine:latest", "oci:/etc", "dir:/etc", "docker://reg.example/x"),
        *(
            "reg.example/x:a b",
            "reg.example/x;id",
            "reg.example/$(id)",
            "reg.example/x\n",
            "-x.example/y",
            "reg.example/",
        ),
        *("reg.example/X", "reg.example/x@sha256:abc", "reg.example//x", "reg.example/../x", "user:pw@reg.example/x"),
    ],
)
def test_only_what_a_registry_has_is_a_reference(reference: str) -> None:
    with pytest.raises(ValidationError):
        ImageSource(reference=reference)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"reference": "reg.example/x", "archive": {"sha256": "a" * 64, "size": 1}},
        {"archive": {"sha256": "a" * 64, "size": 1}, "credentials": True},
        {"archive": {"sha256": "a" * 64, "size": 1}, "insecure": True},
        {"archive": {"sha256": "$(id)", "size": 1}},
    ],
)
def test_it_is_one_thing_from_one_place(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ImageSource.model_validate(values)


def test_an_image_is_built_by_itself() -> None:
    for more in ({"run": ["true"]}, {"apt": ["a"]}, {"pip": ["a"]}):
        with pytest.raises(ValidationError):
            TemplateBuild.model_validate({"name": "x", "image": {"reference": "reg.example/x"}, **more})


def test_the_key_goes_by_the_digest() -> None:
    def key(**image: Any) -> str:
        request = TemplateBuild.model_validate({"name": "x", "image": image})
        return build_key(request, workspace="w", parent_digest="p", network="n")

    assert key(reference=f"one.example/x@{DIGEST}") == key(reference=f"two.example/y:t@{DIGEST}", insecure=True)
    assert key(reference="one.example/x:1") != key(reference="one.example/x:2")
    assert key(archive={"sha256": "a" * 64, "size": 1}) != key(archive={"sha256": "b" * 64, "size": 1})


def read(config: Any, *, fetched: bytes = DIGEST.encode() + b"\n") -> Any:
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    return read_imported(SOURCE, fetched=fetched, config=raw)


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"config": 1}',
        {"config": {"Env": "A=b"}},
        {"config": {"Entrypoint": {"a": 1}}},
        {"config": {"Cmd": ["x"] * 1001}},
        {"config": {"WorkingDir": "relative"}},
        {"config": {"WorkingDir": "/two\nlines"}},
    ],
)
def test_what_makes_no_sense_is_not_believed(config: Any) -> None:
    assert read(config) is None


def test_a_digest_must_be_one() -> None:
    assert read({}) is not None
    for fetched in (b"", b"sha256:zz", b"x" * 100, DIGEST.encode() + b"; id"):
        assert read({}, fetched=fetched) is None


def test_what_it_says_is_kept_within_bounds() -> None:
    config = {
        "architecture": "x" * 1000,
        "config": {
            "Env": ["A=b", "B=c=d", "no-name=1", "C=two\nlines", "=", "LONG=" + "x" * 5000],
            "Entrypoint": ["/bin/tool", "it's"],
            "Cmd": ["--serve", "$HOME"],
            "WorkingDir": "/srv",
        },
    }
    imported = read(config)
    assert imported.env == {"A": "b", "B": "c=d"}
    assert imported.info.left_out == ["env no-name", "env C", "env ", "env LONG"]
    assert imported.start == "exec /bin/tool 'it'\"'\"'s' --serve '$HOME'"
    assert (imported.info.digest, imported.info.folder, len(imported.info.architecture)) == (DIGEST, "/srv", 64)
    assert read({"config": {"Cmd": ["/bin/bash"]}}).start is None
    assert read({"config": {"Cmd": ["python3"]}}).start == "exec python3"
    assert read({"config": {"Entrypoint": ["/bin/sh"]}}).start == "exec /bin/sh"


@pytest.mark.parametrize(
    ("told", "user", "shell"),
    [
        (b"worker bash\n", "worker", "bash"),
        (b"uid-5 \n", "uid-5", "sh"),
        (b"", "root", "sh"),
        (b"$(id) bash", "root", "bash"),
    ],
)
def test_user_and_shell(told: bytes, user: str, shell: str) -> None:
    fitted = read_fitted(read({}), told)
    assert (fitted.info.user, fitted.info.shell) == (user, shell)


def test_all_scripts_are_well_formed() -> None:
    archive = ImageSource.model_validate({"archive": {"sha256": "a" * 64, "size": 1}})
    secret = ImageSource(reference="reg.example/x:1", credentials=True, insecure=True)
    steps = [fetch_step(source, loader="ld.so") for source in (SOURCE, archive, secret)]
    steps += [unpack_step(loader="ld.so", max_mib=64), fit_step({"A": "it's $(id)"})]
    for step in steps:
        assert subprocess.run(["bash", "-n"], input=step.script, text=True, capture_output=True).returncode == 0
    assert f"rm -rf {CREDENTIALS} {ARCHIVE}" in steps[2].script
    assert "--no-creds" in steps[0].script
    assert "tls-verify" not in steps[0].script


def test_credentials_are_a_file_for_the_sandbox_and_nothing_else() -> None:
    with open_image("reg.example:5000/x:1", credentials=("me", "pass word"), insecure=False) as image:
        assert "pass" not in json.dumps(image.values)
        (file,) = image.uploads
        assert (file.path, file.mode) == (CREDENTIALS, 0o600)
        assert isinstance(file.content, bytes)
        assert list(json.loads(file.content)["auths"]) == ["reg.example:5000"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("docker.io/library/alpine:3.20", "alpine"),
        (f"reg.example:5000/team/my__tool@{DIGEST}", "my__tool"),
        (Path("/x/My Image.tar"), "my-image"),
        (Path("layout"), "layout"),
    ],
)
def test_a_template_is_called_as_its_image(source: Any, name: str) -> None:
    assert image_name(source) == name


def test_equal_layouts_are_equal_archives(tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        layout = tmp_path / str(number)
        (layout / "blobs" / "sha256").mkdir(parents=True)
        (layout / "oci-layout").write_text("{}")
        (layout / "blobs" / "sha256" / "a").write_text("x")
        with open_image(layout, credentials=None, insecure=False) as image:
            digests.append(image.values["archive"]["sha256"])
    assert digests[0] == digests[1]
    (tmp_path / "1" / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="link"), open_image(tmp_path / "1", credentials=None, insecure=False):
        pass
