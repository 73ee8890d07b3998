"""Files of a sandbox, against a scripted gateway."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from cpuos import AsyncSandbox
from cpuos.errors import CpuosError, FileProblem, InvalidRequest, OutputLost
from unit.client.fake_api import FakeApi, Fault

FILES = r"/v1/sandboxes/\w+/files"
ODD_NAMES = [
    "🤣.txt",
    "报告 1.pdf",
    "a\"b'.txt",
    "-rf",
    "new\nline",
    "\u00e9",
    "e\u0301",
    "x" * 255,
    "%2e%2e",
    "a;b?c#d",
    "a+b&c=d",
    "caf\udce9",
]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_any_name(api: FakeApi, name: str) -> None:
    async with await AsyncSandbox.create() as sbx:
        await sbx.files.write(name, b"data")
        assert list(api.files) == [os.fsencode(name)]
        assert await sbx.files.read(Path(name)) == b"data"
        assert await sbx.files.exists(name)
        await sbx.files.remove(name)
        assert not await sbx.files.exists(name)


@pytest.mark.parametrize("size", [0, 1, 65536, (1 << 20) + 1, 5_000_000])
async def test_bytes_of_any_kind(api: FakeApi, size: int) -> None:
    data = os.urandom(size)
    async with await AsyncSandbox.create() as sbx:
        for given in (data, bytearray(data), memoryview(data), io.BytesIO(data), [data], iter([data[:7], data[7:]])):
            await sbx.files.write("f", given, mode=0o755)
            assert api.files[b"f"] == data
            assert await sbx.files.read("f") == data
        assert api.calls("PUT", FILES)[0].query["mode"] == "0755"
        assert b"".join([piece async for piece in sbx.files.open_read("f", offset=size // 2)]) == data[size // 2 :]


async def test_text_and_real_files(api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("héllo")
    async with await AsyncSandbox.create() as sbx:
        await sbx.files.write("f", "über")
        assert await sbx.files.read_text("f") == "über"
        with path.open() as text:
            await sbx.files.write("f", text)
        assert api.files[b"f"] == "héllo".encode()
        with pytest.raises(InvalidRequest):
            await sbx.files.write("f", 5)


async def test_a_read_cut_in_the_middle_starts_anew(api: FakeApi, delays: list[float]) -> None:
    data = os.urandom(100_000)
    api.files[b"f"] = data
    async with await AsyncSandbox.create() as sbx:
        api.faults = [Fault("GET", FILES, cut_after=50_000), Fault("GET", FILES, close=True)]
        assert await sbx.files.read("f") == data
        api.faults = [Fault("GET", FILES, cut_after=50_000)]
        with pytest.raises(OutputLost):
            assert [piece async for piece in sbx.files.open_read("f")] == []


async def test_a_body_that_can_be_sent_once_is_not_sent_twice(api: FakeApi, delays: list[float]) -> None:
    async with await AsyncSandbox.create() as sbx:
        api.faults = [Fault("PUT", FILES, close=True)]
        await sbx.files.write("f", io.BytesIO(b"abc"))
        assert api.files[b"f"] == b"abc"
        api.faults = [Fault("PUT", FILES, close=True)]
        with pytest.raises(CpuosError) as caught:
            await sbx.files.write("f", iter([b"abc"]))
        assert caught.value.what.startswith("cannot tell the outcome")


async def test_the_rest(api: FakeApi) -> None:
    api.files = {b"/workspace/a": b"1", b"/workspace/b": b"22"}
    async with await AsyncSandbox.create() as sbx:
        assert [(info.path, info.size) for info in await sbx.files.list()] == [("/workspace/a", 1), ("/workspace/b", 2)]
        assert (await sbx.files.stat("/workspace/b")).size == 2
        await sbx.files.mkdir("d", mode=0o700)
        await sbx.files.move("a", "b", overwrite=True)
        assert api.calls("POST", f"{FILES}/move")[0].query == {"path": "a", "to": "b", "overwrite": "true"}
        assert (await sbx.files.url("a", expires="1h")).startswith(api.url)
        events = [event async for event in sbx.files.watch("/workspace")]
        assert [(event.kind, event.path) for event in events] == [("created", "/workspace/a")]
        with pytest.raises(FileProblem) as caught:
            await sbx.files.read("nope")
        assert caught.value.code == "file_not_found"


async def test_upload_and_download_of_one_file(api: FakeApi, tmp_path: Path) -> None:
    source = tmp_path / "script.sh"
    source.write_bytes(os.urandom(3_000_000))
    source.chmod(0o755)
    async with await AsyncSandbox.create() as sbx:
        report = await sbx.files.upload(source, "/workspace/script.sh")
        assert report.bytes == 3_000_000
        assert api.files[b"/workspace/script.sh"] == source.read_bytes()
        assert api.calls("PUT", FILES)[0].query["mode"] == "0755"
        await sbx.files.upload(source, "/workspace/in/")
        assert b"/workspace/in/script.sh" in api.files
        api.stat[b"/workspace/script.sh"] = {"mode": 0o6755}
        api.faults = []
        await sbx.files.download("/workspace/script.sh", tmp_path / "new" / "copy")
        assert (tmp_path / "new" / "copy").read_bytes() == source.read_bytes()
        assert (tmp_path / "new" / "copy").stat().st_mode & 0o7777 == 0o755
        await sbx.files.download("/workspace/script.sh", tmp_path / "new")
        assert (tmp_path / "new" / "script.sh").exists()
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FileProblem) as caught:
            await sbx.files.download("/workspace/script.sh", tmp_path / "link")
        assert caught.value.code == "unsafe_path"
        assert not (tmp_path / "elsewhere").exists()
        with pytest.raises(FileProblem):
            await sbx.files.upload(tmp_path / "missing", "x")


async def test_a_download_cut_in_the_middle_starts_anew(api: FakeApi, tmp_path: Path, delays: list[float]) -> None:
    data = os.urandom(300_000)
    api.files[b"f"] = data
    async with await AsyncSandbox.create() as sbx:
        api.faults = [Fault("GET", FILES, cut_after=150_000)]
        await sbx.files.download("f", tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == data
        api.faults = [Fault("GET", FILES, cut_after=150_000) for _ in range(30)]
        with pytest.raises(OutputLost):
            await sbx.files.download("f", tmp_path / "g")
    assert os.listdir(tmp_path) == ["f"]


async def test_folders_go_up_and_down(api: FakeApi, tmp_path: Path, delays: list[float]) -> None:
    source = tmp_path / "project"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "deep" / "er" / "data").write_bytes(os.urandom(2_500_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    os.mkfifo(source / "pipe")
    async with await AsyncSandbox.create() as sbx:
        report = await sbx.files.upload(source, "/workspace/p")
        assert (report.files, [skipped.path for skipped in report.skipped]) == (2, ["pipe"])
        with tarfile.open(fileobj=io.BytesIO(api.trees[b"/workspace/p"])) as sent:
            assert sorted(sent.getnames()) == ["deep", "deep/er", "deep/er/data", "empty", "link", "run.sh"]
        api.stat[b"/workspace/p"] = {"kind": "directory"}
        api.faults = [Fault("GET", f"{FILES}/tree", cut_after=1_000_000)]
        report = await sbx.files.download("/workspace/p", tmp_path / "back")
        assert (report.files, report.bytes) == (2, 2_500_010)
        assert [skipped.path for skipped in report.skipped] == ["link"]
    assert (tmp_path / "back/deep/er/data").read_bytes() == (source / "deep/er/data").read_bytes()
    assert (tmp_path / "back/empty").is_dir()
    assert os.access(tmp_path / "back/run.sh", os.X_OK)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["deep", "empty", "run.sh"]
