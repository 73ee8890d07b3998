"""Each template that comes with cpuOS boots, and does what is said of it. Those that `make templates` alone builds are
tested where they are built."""

from __future__ import annotations

import pytest

from cpuos import Client, Sandbox
from cpuos.settings import load_settings
from cpuos.setup.templates import TEMPLATES

pytestmark = [pytest.mark.gvisor, pytest.mark.timeout(300)]

C = "printf '#include <stdio.h>\\nint main(void) { puts(\"c\"); }\\n' > a.c && cc -o a a.c && ./a"
GO = "printf 'package main\\nfunc main() { println(\"go\") }\\n' > a.go && go run a.go 2>&1"
RUST = "printf 'fn main() { println!(\"rust\"); }\\n' > a.rs && rustc a.rs -o r && ./r"
CMAKE = (
    "printf 'cmake_minimum_required(VERSION 3.20)\\nproject(a C)\\nadd_executable(b a.c)\\n' > CMakeLists.txt"
    " && cmake -S . -B out -G Ninja > /dev/null && cmake --build out > /dev/null && out/b"
)
NODE = "node -e 'console.log([1, 2].map((n) => n * 2).join())' && npm --version > /dev/null"
PANDAS = "python -c 'import pandas, matplotlib, openpyxl; print(pandas.Series([1, 2]).sum())'"
CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --dump-dom 'data:text/html,<p>hi' | grep -c hi"
TYPST = "echo '= Title' > a.typ && typst compile a.typ && pdftotext a.pdf - | head -1"
WORK = {
    "base": [("git init -q . && git status -s -b | head -1", "## No commits yet on master"), ("jq -n 1+1", "2")],
    "python": [(PANDAS, "3"), ("python -m venv v && v/bin/pip --version > /dev/null && echo pip", "pip")],
    "node": [(NODE, "2,4")],
    "browser": [(CHROMIUM, "1"), (PANDAS, "3")],
    "computer": [(TYPST, "Title"), (PANDAS, "3")],
    "devbox": [(C, "c"), (GO, "go"), (RUST, "rust"), (CMAKE, "c"), (NODE, "2,4"), (PANDAS, "3")],
}


def built() -> list[object]:
    return [
        pytest.param(
            template.name,
            marks=pytest.mark.skipif(
                not (load_settings().template_dir / template.name / "root.erofs").exists(),
                reason=f"the template {template.name!r} is not built here; `make templates`",
            ),
        )
        for template in TEMPLATES
    ]


@pytest.mark.parametrize("template", built())
def test_it_boots_and_does_what_is_said_of_it(client: Client, template: str) -> None:
    with Sandbox.create(template, client=client, memory="2GiB", disk="2GiB") as sandbox:
        for work, told in WORK[template]:
            done = sandbox.exec(work, timeout="2m")
            assert (done.exit_code, done.stdout.strip()) == (0, told), (work, done.stderr)
        assert sandbox.exec("sudo -n id -un; id -un").stdout == "root\nuser\n"
