"""The template `computer`: each tool that is promised of it does its work. Needs `make templates`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpuos import Client, Sandbox
from cpuos.settings import load_settings

pytestmark = [
    pytest.mark.gvisor,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (load_settings().template_dir / "computer" / "root.erofs").exists(),
        reason="the template 'computer' is not built here; `make templates`",
    ),
]


@pytest.fixture(scope="module")
def computer(client: Client) -> Iterator[Sandbox]:
    with Sandbox.create("computer", client=client, memory="2GiB", disk="2GiB", timeout="15m") as sandbox:
        sandbox.exec("printf 'name,count\\nplum,3\\npear,4\\n' > table.csv; echo '# Title' > text.md", check=True)
        yield sandbox


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (
            "soffice --headless --convert-to xlsx table.csv > /dev/null && python3 -c 'import pandas;"
            ' print(pandas.read_excel("table.xlsx")["count"].sum())\'',
            "7",
        ),
        ("soffice --headless --convert-to pdf table.csv > /dev/null && pdftotext table.pdf - | grep plum", "plum"),
        ("pandoc text.md -o text.docx && pandoc text.docx -t plain", "Title"),
        ("printf '= Hello' > a.typ && typst compile a.typ && pdftotext a.pdf - | head -1", "Hello"),
        ("typst compile a.typ a2.pdf && qpdf --empty --pages a.pdf a2.pdf -- b.pdf && qpdf --show-npages b.pdf", "2"),
        ("gs -q -sDEVICE=png16m -r100 -o page.png a.pdf && file -b --mime-type page.png", "image/png"),
        (
            "convert -size 400x80 xc:white -pointsize 48 -annotate +20+55 'PLUMS' ocr.png && tesseract ocr.png - -l eng"
            " 2> /dev/null | head -1",
            "PLUMS",
        ),
        ("vips resize ocr.png small.png 0.5 && vipsheader -f width small.png", "200"),
        (
            "ffmpeg -loglevel error -f lavfi -i sine=d=1 tone.mp3 && ffprobe -v error -show_entries"
            " format=format_name -of csv=p=0 tone.mp3",
            "mp3",
        ),
        ("python3 -c 'import numpy, matplotlib, openpyxl, docx, pypdf; print(numpy.arange(5).sum())'", "10"),
        ("rg -c pear table.csv; echo '{\"a\": 1}' | jq .a; sqlite3 :memory: 'select 2'", "1\n1\n2"),
        ("sudo -n id -un", "root"),
    ],
    ids=[
        "calc",
        "pdf",
        "pandoc",
        "typst",
        "qpdf",
        "ghostscript",
        "tesseract",
        "vips",
        "ffmpeg",
        "python",
        "small",
        "sudo",
    ],
)
def test_a_tool_does_its_work(computer: Sandbox, work: str, told: str) -> None:
    done = computer.exec(work, timeout="3m")
    assert (done.exit_code, done.stdout.strip()) == (0, told), done.stderr
