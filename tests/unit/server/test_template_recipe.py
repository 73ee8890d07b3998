"""What goes into a build's key, what its steps run, and what is believed of the packer's answer."""

from __future__ import annotations

import asyncio
import shlex
import subprocess

import pytest

from cpuos.server.templates.packer import read_packer
from cpuos.server.templates.recipe import build_key, layer_keys, read_packed, steps_of, steps_shown
from cpuos.types.template import BuildFile, TemplateBuild

DIGEST = "a" * 64


def recipe(**values: object) -> TemplateBuild:
    return TemplateBuild.model_validate({"name": "x", **values})


def key(parent: str = "sha256:p", workspace: str = "w", network: str = "n", **values: object) -> str:
    return build_key(recipe(**values), workspace=workspace, parent_digest=parent, network=network)


def layers(parent: str = "sha256:p", workspace: str = "w", network: str = "n", **values: object) -> list[str]:
    return layer_keys(recipe(**values), workspace=workspace, parent_digest=parent, network=network)


def test_all_that_makes_the_image_is_in_the_key_and_nothing_else():
    file = {"path": "/a", "sha256": DIGEST, "size": 1}
    base = {"files": [file], "run": ["true"], "env": {"A": "b"}}
    same = key(**base)
    assert key(**base, cpu=4, timeout_s=10, memory_mib=512, fresh=True) == same
    assert key(files=[file], network="n") == key(files=[file], network="m")
    others = [
        key(network="m", **base),
        key(parent="sha256:q", **base),
        key(workspace="v", **base),
        key(**{**base, "run": ["false"]}),
        key(**{**base, "env": {"A": "c"}}),
        key(**{**base, "files": [{**file, "sha256": "b" * 64}]}),
        key(**{**base, "files": [{**file, "mode": 0o755}]}),
        key(**base, apt=["a"]),
        key(**base, pip=["a"]),
        key(**base, start="a"),
        key(**base, start="a", ready="port:1"),
    ]
    assert len({same, *others}) == len(others) + 1


def test_the_order_of_files_does_not_matter_that_of_commands_does():
    files = [{"path": path, "sha256": DIGEST, "size": 1} for path in ("/a", "/b")]
    assert key(files=files) == key(files=files[::-1])
    assert key(run=["a", "b"]) != key(run=["b", "a"])


def test_a_layer_is_of_its_step_and_all_before_it():
    file = {"path": "/a", "sha256": DIGEST, "size": 1}
    base = {"files": [file], "apt": ["a"], "run": ["one", "two"], "env": {"A": "b"}}
    same = layers(**base)
    assert len(set(same)) == 4

    def kept(**changes: object) -> int:
        """So many of the steps are not done again."""
        other = layers(**{**base, **changes})
        return next((number for number, key in enumerate(other) if key != same[number : number + 1][0]), len(other))

    assert kept(start="a", timeout_s=10, name="y") == 4
    assert kept(run=["one", "other"]) == 3
    assert kept(run=["one"]) == 3
    assert kept(run=["other", "two"]) == 2
    assert kept(apt=["b"]) == 1
    assert kept(files=[{**file, "sha256": "b" * 64}]) == 0
    assert kept(files=[{**file, "mode": 0o755}]) == 0
    assert kept(env={"A": "c"}) == 0
    assert kept(memory_mib=512) == 0
    assert kept(network="m") == 1, "files are laid down without a look at the network"
    assert kept(parent="sha256:q") == kept(workspace="v") == 0


def test_steps_come_in_order():
    request = recipe(
        run=["one", "two\nlines"], pip=["p"], apt=["a"], files=[{"path": "/a", "sha256": DIGEST, "size": 1}]
    )
    assert [step.name for step in steps_of(request)] == ["files", "apt", "pip", "run 1", "run 2"]
    assert [step.name for step in steps_shown(request)][-3:] == ["pack", "store", "try"]
    assert steps_shown(request)[4].text == "two …"


@pytest.mark.parametrize("path", ["/opt/a b", "/opt/quo'te", '/opt/"', "/opt/$(touch x)", "/opt/back\\slash", "/opt/é"])
def test_no_path_breaks_out_of_its_script(path, tmp_path):
    """The script is run against a copy of the path below a folder of this test."""
    place = tmp_path / path.lstrip("/")
    place.parent.mkdir()
    place.write_text("x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    # Below /tmp no image has files, so the check of the model is passed by.
    file = BuildFile.model_construct(path=str(place), sha256=digest, size=1, mode=0o640)
    request = recipe().model_copy(update={"files": [file]})
    script = steps_of(request)[0].script.replace("chown -h root:root", "test -e")
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert place.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["opt"]


def test_values_of_variables_stay_one_word():
    script = steps_of(recipe(env={"A": 'it\'s $(id) "x" `y`'}))[0].script
    words = shlex.split(script)
    assert words[2] == 'A="it\'s $(id) "x" `y`"\n'


def test_the_packers_answer_is_read_and_nothing_else():
    told = f"10\n{DIGEST}\n3\nc /dev/x\nx user.a b /a file\ns /sock\n".encode()
    packed = read_packed(told)
    assert packed is not None
    assert (packed.size, packed.sha256, packed.dropped_count) == (10, DIGEST, 3)
    assert [(entry.path, entry.what) for entry in packed.dropped] == [
        ("/dev/x", "device"),
        ("b /a file", "user.a"),
        ("/sock", "socket"),
    ]
    for wrong in (b"", b"\xff\n", f"-1\n{DIGEST}\n0\n".encode(), b"1\nzz\n0\n", f"1\n{DIGEST}\n".encode()):
        assert read_packed(wrong) is None
    flood = f"1\n{DIGEST}\n{10**30}\n".encode() + b"c /x\n" * 1000
    packed = read_packed(flood)
    assert packed is not None
    assert len(packed.dropped) == 100


def test_the_packer_runs_with_its_own_loader(tmp_path):
    packer = asyncio.run(read_packer())
    for name, content in packer.files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    argv = [f"./{packer.loader}", "--library-path", ".", f"./{packer.program}", "--help"]
    done = subprocess.run(argv, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert "erofs" in done.stdout + done.stderr
