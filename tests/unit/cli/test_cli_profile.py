"""What `profile run` tells at its end, and the next command, which can be pasted as it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from cpuos.cli.main import main
from cpuos.errors import InvalidRequest
from cpuos.profiles import python_data
from cpuos.profiles.evidence import (
    Artifact,
    CommandEvidence,
    Evidence,
    EvidenceStatus,
    FileEvidence,
    GuestEvidence,
    HostEvidence,
    SandboxEvidence,
)

LINE = ["profile", "run", "python-data", "--input", "my data.csv", "--input", "b.csv", "--script", "a b.py"]
NO_VALUES = "no values: the script wrote no out/values.json and its last line of stdout is no JSON object"


def evidence_of(status: str, *, reason: str = "", notes: tuple[str, ...] = (), chart: str = "") -> Evidence:
    numbers = dict.fromkeys(("stdout_bytes", "stderr_bytes", "stdout_dropped_bytes", "stderr_dropped_bytes"), 0)
    times: dict[str, Any] = {"started_at": None, "ended_at": None, "duration_s": 7.0}
    command = CommandEvidence(id="c", argv=["python"], cwd="/", status=status, reason="", **times, **numbers)
    sandbox = SandboxEvidence(
        id="s",
        template="python",
        template_digest="sha256:x",
        runtime="gvisor",
        isolation="gvisor",
        isolation_detail="systrap",
        memory_mib=2048,
    )
    file = FileEvidence(name="a", sha256="x", size=1)
    artifacts = [Artifact(name=chart, sha256="x", size=1, media_type="image/png")] if chart else []
    return Evidence(
        profile="python-data",
        status=EvidenceStatus.FAILED if reason else EvidenceStatus.SUCCEEDED,
        reason=reason,
        notes=list(notes),
        host=HostEvidence(sandbox=sandbox, inputs=[], script=file, command=command, artifacts=artifacts),
        guest=GuestEvidence(exit_code=1 if reason else 0, signal=None, values=None, values_from="none"),
    )


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets how the script ended and what it printed; returns what `run` was called with."""
    monkeypatch.chdir(tmp_path)

    def end(evidence: Evidence | Exception, *, stdout: str = "", stderr: str = "") -> dict[str, Any]:
        called: dict[str, Any] = {}

        def run(profile: object, **options: Any) -> Evidence:
            called.update(options)
            if isinstance(evidence, Exception):
                raise evidence
            options["out"].mkdir(exist_ok=True)
            (options["out"] / "stdout.txt").write_text(stdout)
            (options["out"] / "stderr.txt").write_text(stderr)
            return evidence

        monkeypatch.setattr(python_data, "run", run)
        return called

    return end


def test_a_failed_script_shows_its_end_and_no_noise(ended: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failed = evidence_of("exited", reason="the script ended with exit code 1", notes=(NO_VALUES,))
    printed = "".join(f"row {number}\n" for number in range(20))
    ended(failed, stdout=printed, stderr="Traceback\nKeyError: 'total'\n")
    assert main(LINE) == 1
    shown = capsys.readouterr()
    assert shown.out == "isolation: gvisor (systrap)\n"
    lines = shown.err.splitlines()
    assert lines[:2] == ["failed: the script ended with exit code 1", "the end of its stdout:"]
    assert lines[2:12] == [f"  row {number}" for number in range(10, 20)]
    assert lines[12:] == [
        "the end of its stderr:",
        "  Traceback",
        "  KeyError: 'total'",
        "try: cat evidence/stderr.txt",
    ]


def test_a_script_without_values_says_so(ended: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended(evidence_of("exited", notes=(NO_VALUES,), chart="a.png"))
    assert main([*LINE, "--out", "my folder"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:2] == ["values:    none", "chart:     my folder/artifacts/a.png"]
    assert shown.err.splitlines() == [NO_VALUES, "next:      python3 -m json.tool 'my folder/evidence.json'"]


@pytest.mark.parametrize(
    ("status", "more"), [("oom_killed", ["--memory", "4096MiB"]), ("timed_out", ["--timeout", "14s"])]
)
def test_after_a_limit_the_same_with_more_of_it(
    status: str, more: list[str], ended: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    called = ended(evidence_of(status, reason="it ran into a limit"))
    assert main([*LINE, "--cpu", "1"]) != 0
    assert (called["cpu"], called["memory"]) == (1, None)
    again = shlex.split(capsys.readouterr().err.splitlines()[-1].removeprefix("try: cpuos "))
    assert again[:3] == LINE[:3]
    for words in (["--input", "my data.csv"], ["--input", "b.csv"], ["--script", "a b.py"], ["--cpu", "1"], more):
        assert any(again[place : place + 2] == words for place in range(len(again))), again
    assert len(again) == len(LINE) + 4
    ended(evidence_of("exited"))
    assert main(again) == 0, "it can be read again"


def test_a_missing_module_names_the_way_to_a_template(ended: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended(evidence_of("exited", reason="exit code 1"), stderr="ModuleNotFoundError: No module named 'seaborn'\n")
    main(LINE)
    assert capsys.readouterr().err.splitlines()[-1] == ("try: cpuos template build --help  # a template with seaborn")


def test_another_folder_is_a_whole_command(ended: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended(InvalidRequest("cannot write evidence to: keep", "it has other files", hint="--out keep-2"))
    assert main([*LINE, "--out", "keep", "--allow-emulated"]) == 2
    again = shlex.split(capsys.readouterr().err.splitlines()[-1].removeprefix("try: cpuos "))
    called = ended(evidence_of("exited"))
    assert main(again) == 0
    assert (called["out"], called["allow_emulated"]) == (Path("keep-2"), True)
    assert called["inputs"] == [Path("my data.csv"), Path("b.csv")]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (["."], "it is a folder"),
        (["no such.csv"], "there is no such file"),
        (["a b.csv", "sub/a b.csv"], "'a b.csv' is taken"),
    ],
)
def test_a_wrong_input_is_told_with_a_line_to_paste(
    inputs: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a b.csv", "sub/a b.csv", "script.py"):
        (tmp_path / name).write_text("")
    options = [word for path in inputs for word in ("--input", path)]
    assert main(["profile", "run", "python-data", "--script", "script.py", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert why in lines[1]
    program, *words = shlex.split(lines[2].removeprefix("try: "))
    assert program in ("ls", "cp")
    assert Path(words[1] if program == "ls" else words[0]).exists()
