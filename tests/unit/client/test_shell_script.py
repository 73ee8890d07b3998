"""The bash side of a kept shell, run by the bash of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from cpuos.client._shell import MAX_TEXT_ARGUMENT, ShellState, shell_argv


class Ran(NamedTuple):
    stdout: str | None
    stderr: str
    code: int | None
    lost: bool


class LocalShell:
    """What `AsyncShell` does, without a sandbox."""

    def __init__(self, folder: Path) -> None:
        self.state = ShellState(directory=str(folder / "state"), cwd=str(folder))

    def run(self, text: str, *, timeout: float = 10) -> Ran:
        if len(text.encode()) > MAX_TEXT_ARGUMENT:
            Path(self.state.text_path).write_text(text)
        try:
            done = subprocess.run(
                shell_argv(text, self.state),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=timeout,
                cwd="/",
                check=False,
            )
            ran = (done.stdout, done.stderr, done.returncode)
        except subprocess.TimeoutExpired:
            ran = (None, "", None)
        path = Path(self.state.status_path)
        status = path.read_bytes() if path.exists() else None
        self.state, lost = self.state.after(status, exit_status=ran[2])
        return Ran(*ran, lost)


@pytest.fixture
def shell(tmp_path: Path) -> LocalShell:
    return LocalShell(tmp_path)


KEPT = [
    "cat <<EOF\nx\nEOF",
    "cat <<EOF\nx",
    "echo 'unbalanced",
    'echo "unbalanced',
    "((",
    "}",
    "if true",
    "`",
    "${",
    "\\",
    ";;",
    "x=(",
    "exit 3",
    "set -e; false",
    "set -e",
    "set -u; echo $nope",
    "set -u",
    "set -x",
    "set -v",
    "set -t",
    "set -f; set -C",
    "set -o posix",
    "set -a",
    "exec nosuchprogram",
    "trap 'echo bye' EXIT",
    "trap 'echo bye' EXIT; exit 4",
    "trap - EXIT",
    "trap '' INT TERM",
    "trap 'echo debug' DEBUG",
    "trap 'echo failed' ERR; false",
    "mkdir gone; cd gone; rmdir ../gone",
    "readonly R=1; R=2",
    "readonly PATH IFS",
    "f() { exit 7; }; f",
    "cd() { echo no; return 1; }; declare() { echo no; }; printf() { :; }; eval() { echo no; }; set() { echo no; }",
    "alias eval='echo no' builtin='echo no' declare='echo no' __cpuos_ready='echo no'",
    "unset -f trap",
    "IFS=x",
    "unset PATH PWD OLDPWD HOME IFS",
    "exec >/dev/null 2>&1",
    "exec 1>&- 2>&-",
    "ulimit -n 20",
    "kill -TERM $$",
    "return 5",
    "sleep 0.1 &",
    "coproc cat",
    "shopt -u expand_aliases; shopt -s nullglob extglob failglob",
    "enable -n cd printf declare 2>/dev/null",
    "PS4='$(echo boom)'; set -x",
    "",
    "#",
]
LOST = ["exec bash", "exec true", "kill -9 $$", "set -n; echo no"]


@pytest.mark.parametrize("nasty", KEPT + LOST)
def test_no_text_spoils_the_next_run(shell: LocalShell, nasty: str) -> None:
    shell.run("KEPT=1")
    ran = shell.run(nasty)
    assert ran.lost == (nasty in LOST or nasty.startswith("enable"))
    for _ in range(2):
        ran = shell.run("echo ok $KEPT")
        assert (ran.stdout, ran.lost) == ("ok 1\n", False)


def test_they_do_not_spoil_it_together_either(shell: LocalShell) -> None:
    harmless = [text for text in KEPT if not text.startswith(("enable", "exec", "unset PATH", "readonly"))]
    for nasty in harmless:
        shell.run(nasty)
        ran = shell.run("echo ok")
        assert (ran.stdout or "").splitlines()[-1:] == ["ok"], nasty


def test_a_killed_run_loses_only_itself(shell: LocalShell) -> None:
    shell.run("X=1; cd /usr")
    assert shell.run("X=2; cd /; sleep 100", timeout=0.5).lost
    assert shell.run("echo $X $PWD").stdout == "1 /usr\n"


def test_a_removed_state_is_told(shell: LocalShell) -> None:
    shell.run("X=1")
    assert shell.run(f"rm -rf {shell.state.directory}").lost
    ran = shell.run("echo [$X]")
    assert (ran.stdout, ran.lost) == ("[]\n", True)
    assert not shell.run("true").lost


def test_everything_that_makes_a_shell_is_kept(shell: LocalShell) -> None:
    shell.run(
        "cd /usr/lib; export X=$'a\\nb' Y='q\"'; declare -A m=([a]='1 2' ['b c']=3); arr=(1 '2 3'); declare -i n=5\n"
        "f() { echo f \"$@\"; }\nalias hello='echo aliased'\nset -- p 'q r' ''\numask 027\npushd /tmp >/dev/null\nfalse"
    )
    ran = shell.run(
        'echo $?; printf \'[%s]\' "$X" "$Y" "${m[b c]}" "${arr[1]}" "$@"; echo; f 1 2; hello x; umask; dirs\n'
        "n=2+3; echo $n; env | grep -c ^X=; popd >/dev/null; pwd; cd - >/dev/null; pwd"
    )
    assert ran.stdout == (
        '1\n[a\nb][q"][3][2 3][p][q r][]\nf 1 2\naliased x\n0027\n/tmp /usr/lib\n5\n1\n/usr/lib\n/tmp\n'
    )


def test_raw_bytes_and_odd_values_are_kept(shell: LocalShell) -> None:
    shell.run("B=$'\\xff\\x01'; E=; N=$'\\n\\n'; declare -n ref=B; declare U; export -n E; D='$(echo run) `x`'")
    ran = shell.run('printf \'[%s]\' "$B" "$E" "$N" "$ref" "${U-unset}" "$D"')
    assert ran.stdout == "[\udcff\x01][][\n\n][\udcff\x01][unset][$(echo run) `x`]"


def test_options_are_kept_and_do_not_end_the_wrapper(shell: LocalShell) -> None:
    shell.run("set -euo pipefail; shopt -s nullglob")
    ran = shell.run("echo /nope*; false | true; echo no")
    assert (ran.stdout, ran.code, ran.lost) == ("\n", 1, False)
    assert shell.run("set +e; false | true; echo $?").stdout == "1\n"
    assert shell.run("echo $undefined").code != 0


def test_traps(shell: LocalShell) -> None:
    ran = shell.run("trap 'echo end $?' EXIT; X=1; exit 6")
    assert (ran.stdout, ran.code) == ("end 6\n", 6)
    assert shell.run("echo $X").stdout == "1\n", "an EXIT trap belongs to its run"
    shell.run("trap 'echo usr' USR1")
    assert shell.run("kill -USR1 $$; (trap 'echo sub' EXIT)").stdout == "usr\nsub\n"


def test_the_runs_own_variables_are_fresh(shell: LocalShell) -> None:
    shell.run("export CPUOS_COMMAND=old; SECONDS=500; (exit 4)")
    ran = shell.run("echo $? ${CPUOS_COMMAND-none} $SHLVL; env | grep -c __cpuos")
    status, command, level, ours = ran.stdout.split()
    assert (status, command, ours) == ("4", "none", "0")
    assert int(level) < 10


def test_long_texts_and_line_numbers(shell: LocalShell) -> None:
    shell.run("true")
    text = "x='" + "y" * 200_000 + "'\necho ${#x}\nnosuch"
    ran = shell.run(text)
    assert ran.stdout == "200000\n"
    assert "line 3: nosuch" in ran.stderr
    assert shell.run("echo ${#x}").stdout == "200000\n"


def test_a_run_reads_end_of_file(shell: LocalShell) -> None:
    assert shell.run("cat; read v; echo $?").stdout == "1\n"
