"""`check`: the one way in which a command's own failure becomes an exception."""

from __future__ import annotations

from typing import Any

import pytest

from cpuos import CommandFailed, Result
from cpuos.types.command import CommandStatus


def result(**values: Any) -> Result:
    given = {"exit_code": None, "signal": None, "stdout": "", "stderr": "", "stdout_raw": b"", "stderr_raw": b""}
    return Result(command_id="c", duration_s=1.0, **{**given, **values})


def test_success_is_returned() -> None:
    fine = result(status=CommandStatus.EXITED, exit_code=0)
    assert fine.check() is fine


@pytest.mark.parametrize(
    ("values", "what", "why"),
    [
        ({"status": CommandStatus.EXITED, "exit_code": 3, "stderr": "a\nlast words\n\n"}, "exit code 3", "last words"),
        ({"status": CommandStatus.TIMED_OUT, "reason": "over 2 s"}, "timed_out", "over 2 s"),
    ],
)
def test_failure_raises_with_the_result(values: dict[str, Any], what: str, why: str) -> None:
    failed = result(**values)
    with pytest.raises(CommandFailed, match=what) as raised:
        failed.check()
    assert raised.value.code == "command_failed"
    assert raised.value.why == why
    assert raised.value.result is failed
