"""The profiles that exist, as data: what each prepares, returns and is limited to."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from cpuos.errors import InvalidRequest
from cpuos.types.near import near_details

__all__ = ["Limits", "Profile", "get_profile", "list_profiles"]


class Limits(BaseModel):
    """What one run may use and return. A sandbox over a limit ends; a result over a limit is a failure, never cut."""

    model_config = ConfigDict(frozen=True)

    cpu: int = 2
    memory_mib: int = 2048
    disk_mib: int = 8192
    timeout_s: float = 300
    artifact_files: int = 1000
    artifact_bytes: int = 256 << 20
    values_bytes: int = 1 << 20


class Profile(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    summary: str
    template: str
    takes: tuple[str, ...]
    returns: tuple[str, ...]
    limits: Limits = Limits()


PYTHON_DATA = Profile(
    name="python-data",
    summary="Runs one Python script over data files and returns what it computed, with the charts as evidence.",
    template="python",
    takes=("input: data files, put beside the script under their own names", "script: one Python file"),
    returns=(
        "values: the JSON object in out/values.json, else the last line of stdout where that is a JSON object",
        "artifacts: every file that the script wrote below out/",
        "stdout, stderr and the record of the command",
    ),
)


def list_profiles() -> list[Profile]:
    """Every profile."""
    return [PYTHON_DATA]


def get_profile(name: str) -> Profile:
    for profile in list_profiles():
        if profile.name == name:
            return profile
    known = [profile.name for profile in list_profiles()]
    raise InvalidRequest(
        f"cannot find profile: {name!r}",
        f"installed are {', '.join(known)}",
        hint="cpuos profile ls",
        details=near_details(name, known),
    )
