"""The python-data profile on real sandboxes: values, charts, honest failures, and scripts that mean harm."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cpuos import Sandbox
from cpuos.cli.main import main
from cpuos.testing.instance import Instance

pytestmark = [pytest.mark.gvisor, pytest.mark.usefixtures("instance")]

TOLD_S = 15.0
"""A dead sandbox answers nothing more, and an agent may take twice as long for an answer."""
TABLE = "month,total\njan,40\nfeb,2\n"
GOOD = """
import json, os, sys
import matplotlib.pyplot as plt
import pandas as pd
table = pd.read_csv(sys.argv[1])
table.plot.bar(x="month", y="total")
plt.savefig(os.path.join(os.environ["CPUOS_OUT"], "chart.png"))
print("not the values")
print(json.dumps({"total": int(table.total.sum()), "rows": len(table)}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sales.csv").write_text(TABLE)
    return tmp_path


def run(folder: Path, script: str, *options: str) -> tuple[int, dict[str, Any]]:
    (folder / "script.py").write_text(script)
    arguments = ["--input", "sales.csv", "--script", "script.py", "--out", "evidence", *options]
    code = main(["profile", "run", "python-data", *arguments])
    return code, json.loads((folder / "evidence" / "evidence.json").read_text())


def test_values_chart_and_level(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, evidence = run(folder, GOOD)
    assert code == 0
    captured = capsys.readouterr()
    values, chart, isolation = captured.out.splitlines()
    assert json.loads(values.removeprefix("values:")) == {"total": 42, "rows": 2}
    assert chart.split() == ["chart:", "evidence/artifacts/chart.png"]
    assert isolation.startswith("isolation: gvisor (")
    assert captured.err.splitlines()[-1].startswith("next:")
    host, guest = evidence["host"], evidence["guest"]
    assert evidence["status"] == "succeeded"
    assert guest == {"exit_code": 0, "signal": None, "values": {"total": 42, "rows": 2}, "values_from": "stdout"}
    assert host["sandbox"]["isolation"] == "gvisor"
    assert host["sandbox"]["template_digest"].startswith("sha256:")
    assert host["inputs"] == [
        {"name": "sales.csv", "sha256": hashlib.sha256(TABLE.encode()).hexdigest(), "size": len(TABLE)}
    ]
    assert host["script"]["sha256"] == hashlib.sha256(GOOD.encode()).hexdigest()
    assert host["command"]["argv"] == ["python", "./script.py", "./sales.csv"]
    (artifact,) = host["artifacts"]
    picture = (folder / "evidence" / "artifacts" / "chart.png").read_bytes()
    assert artifact["media_type"] == "image/png"
    assert artifact["sha256"] == hashlib.sha256(picture).hexdigest()
    assert (folder / "evidence" / "script" / "script.py").read_text() == GOOD
    assert "not the values" in (folder / "evidence" / "stdout.txt").read_text()


def test_json_is_the_evidence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, evidence = run(folder, "print('{\"a\": 1}')", "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out) == evidence


def test_a_file_of_values_goes_before_stdout(folder: Path) -> None:
    _, evidence = run(folder, "open('out/values.json', 'w').write('{\"a\": 1}'); print('{\"a\": 2}')")
    assert evidence["guest"]["values"] == {"a": 1}
    assert evidence["guest"]["values_from"] == "out/values.json"


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("import no_such_module", 1, "exit code 1"),
        ("import os; os.kill(os.getpid(), 11)", 139, "signalled"),
        ("print('begun', flush=True); import time; time.sleep(60)", 124, "over its time"),
    ],
)
def test_a_failure_is_told_as_one(folder: Path, script: str, code: int, reason: str) -> None:
    got, evidence = run(folder, script, "--timeout", "5s")
    assert got == code
    assert evidence["status"] == "failed"
    assert reason in evidence["reason"]
    assert evidence["guest"]["values"] is None


@pytest.mark.parametrize("printed", ["{broken", '{"a": NaN}', "[1]", "plain", ""])
def test_no_values_are_invented(folder: Path, printed: str) -> None:
    code, evidence = run(folder, f"print({printed!r})")
    assert code == 0
    assert evidence["guest"]["values"] is None
    assert evidence["notes"][0].startswith("no values")


def test_what_lies_beside_out_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, evidence = run(folder, "open('chart.png', 'w').close()\nprint('{}')", "--cpu", "1", "--memory", "512MiB")
    assert code == 0
    assert evidence["notes"] == ["not brought back: chart.png, for only what lies below out/ is: write out/chart.png"]
    assert evidence["notes"][0] in capsys.readouterr().err
    assert evidence["host"]["sandbox"]["memory_mib"] == 512


def test_a_lost_sandbox_is_evidence(folder: Path, instance: Instance) -> None:
    ended_at: list[float] = []

    def end_it() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = Sandbox.list(state="running", labels={"profile": "python-data"})
            for info in found:
                box = Sandbox.connect(info.id)
                if any("script.py" in " ".join(job.info.argv) for job in box.commands.list()):
                    instance.kill_sandbox(info.id)
                    ended_at.append(time.monotonic())
                    box.close()
                    return
                box.close()
            time.sleep(0.2)

    thread = threading.Thread(target=end_it)
    thread.start()
    code, evidence = run(folder, "import time; time.sleep(60)")
    told_at = time.monotonic()
    thread.join()
    assert told_at - ended_at[0] < TOLD_S
    assert code == 125
    assert evidence["status"] == "failed"
    assert evidence["guest"]["exit_code"] is None


HARM = r"""
import os
os.chdir("out")
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "folder-link")
os.symlink("../../..", "up")
os.link("/workspace/sales.csv", "hard")
os.mkfifo("pipe")
open(b"caf\xe9.txt", "w").write("x")
open("\x1b]0;owned\x07.png", "wb").write(b"\x89PNG\r\n\x1a\n")
open("fake.png", "w").write("<script>alert(1)</script>")
os.mkdir("evidence.json")
os.chmod("fake.png", 0o4777)
"""


def test_hostile_artifacts_stay_in_their_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in folder.iterdir())
    run(folder, HARM)
    captured = capsys.readouterr()
    assert "\x1b]" not in captured.out + captured.err
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "script.py", "evidence"])
    artifacts = folder / "evidence" / "artifacts"
    for path in artifacts.rglob("*"):
        assert not path.is_symlink()
        assert path.is_file() or path.is_dir()
        assert path.stat().st_mode & 0o7000 == 0
    evidence = json.loads((folder / "evidence" / "evidence.json").read_text())
    kinds = {artifact["name"]: artifact["media_type"] for artifact in evidence["host"]["artifacts"]}
    assert kinds.get("fake.png") == "application/octet-stream"


def test_too_much_is_refused_not_cut(folder: Path) -> None:
    code, evidence = run(folder, "for i in range(1200): open(f'out/{i}', 'w').close()\nprint('{\"a\": 1}')")
    assert code == 125
    assert "1200 files" in evidence["reason"]
    assert evidence["guest"]["values"] == {"a": 1}
    assert evidence["host"]["artifacts"] == []


def test_nothing_is_written_before_the_script_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, text in [
        (["--input", "gone.csv", "--script", "sales.csv"], 2, "cannot read file: gone.csv"),
        (["--input", "sales.csv", "--script", "sales.csv"], 2, "cannot upload file"),
        (["--input", "sales.csv", "--script", "sales.csv", "--timeout", "soon"], 2, "cannot read --timeout"),
        (["--script", "sales.csv", "--template", "no-such"], 125, "no-such"),
    ]:
        assert main(["profile", "run", "python-data", *arguments]) == code
        assert text in capsys.readouterr().err
    assert main(["profile", "run", "no-such", "--script", "sales.csv"]) == 2
    assert os.listdir(folder) == ["sales.csv"]


def test_no_sandbox_is_left(instance: Instance) -> None:
    assert Sandbox.list(state="running", labels={"profile": "python-data"}) == []
