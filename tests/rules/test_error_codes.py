"""Each row of the error table is provoked by a test that names it, and each code in the source is a row."""

from __future__ import annotations

import re
from pathlib import Path

from cpuos.errors import _WORDS, ERRORS, CpuosError

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"""code\s*=\s*["']([a-z_]+)["']""")


def test_each_code_is_provoked() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "rules" not in path.parts]
    named = set(re.findall(r"""["']([a-z_]+)["']""", "\n".join(path.read_text() for path in files)))
    missing = sorted(set(ERRORS) - named)
    assert not missing, f"no test names these codes; write one that provokes each: {missing}"


def test_codes_in_the_source_are_rows() -> None:
    wrong = []
    for path in (ROOT / "src" / "cpuos").rglob("*.py"):
        text = path.read_text()
        if "cpuos.errors" not in text:
            continue
        for match in _CODE.finditer(text):
            if match[1] not in ERRORS:
                wrong.append(f"{path.relative_to(ROOT)}: {match[1]}")
    assert not wrong, "\n".join(wrong)


def test_rows_agree_with_their_classes() -> None:
    for code, (cls, status, meaning) in ERRORS.items():
        assert issubclass(cls, CpuosError)
        assert 400 <= status < 600
        assert meaning.endswith("."), code
        assert cls("cannot do it", code=code).status == status


def test_each_class_has_a_default_row() -> None:
    for cls, _, _ in ERRORS.values():
        assert cls.code in ERRORS


def test_every_row_has_three_lines() -> None:
    for code, (cls, _, _) in ERRORS.items():
        error = cls("cannot do it", code=code).body()["error"]
        assert all(error[line].strip() for line in ("what", "why", "try")), code
        assert error["why"] != error["try"]
    assert set(_WORDS) == set(ERRORS)
