"""The demo's analysis in a microVM and in gVisor: equal values, equal tables, the same picture."""

from __future__ import annotations

import csv
import json
import random
import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from cpuos.cli.main import main
from cpuos.settings import load_settings
from cpuos.testing.instance import Instance

pytestmark = [pytest.mark.gvisor, pytest.mark.microvm, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "examples" / "seattle-weather" / "analysis.py"


def write_weather(path: Path) -> None:
    """Four years with the columns of the demo's table."""
    chance = random.Random(6)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["date", "precipitation", "temp_max", "temp_min", "wind", "weather"])
        for number in range(1461):
            rain = max(0.0, round(chance.gauss(-1, 6), 1))
            low = round(chance.gauss(8, 5), 1)
            high = round(low + abs(chance.gauss(8, 2)), 1)
            rows.writerow([date(2012, 1, 1) + timedelta(days=number), rain, high, low, 3.1, "rain" if rain else "sun"])


def analyse(
    instance: Instance, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[dict[str, Any], bytes]:
    monkeypatch.setenv("CPUOS_API_URL", instance.api_url)
    monkeypatch.setenv("CPUOS_API_KEY", instance.api_key)
    out = folder / f"evidence-{len(options)}"
    arguments = ["--input", str(folder / "weather.csv"), "--script", str(SCRIPT), "--out", str(out)]
    assert main(["profile", "run", "python-data", *arguments, *options]) == 0
    evidence = json.loads((out / "evidence.json").read_text())
    return evidence, (out / "artifacts" / "weather.png").read_bytes()


def test_the_analysis_is_the_same(
    instance: Instance, microvm_instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weather(tmp_path / "weather.csv")
    check_the_same(instance, microvm_instance, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_analysis_of_the_demo_is_the_same(
    instance: Instance, microvm_instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the table of the demo, where set-up has fetched it (`python -m cpuos.setup --example`)."""
    table = load_settings().cache_dir / "examples" / "seattle-weather.csv"
    if not table.exists():
        pytest.skip(f"{table} was not fetched")
    shutil.copyfile(table, tmp_path / "weather.csv")
    check_the_same(instance, microvm_instance, tmp_path, monkeypatch)


def check_the_same(
    instance: Instance, microvm_instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_gvisor, picture = analyse(instance, tmp_path, monkeypatch)
    options = ["--runtime", "microvm", "--allow-emulated", "--timeout", "5m"]
    in_machine, same = analyse(microvm_instance, tmp_path, monkeypatch, *options)
    assert in_gvisor["host"]["sandbox"]["isolation"] == "gvisor"
    assert in_machine["host"]["sandbox"]["runtime"] == "microvm"
    assert in_machine["host"]["sandbox"]["isolation"] in ("microvm", "emulated")
    assert in_machine["host"]["sandbox"]["isolation_detail"].startswith("qemu ")
    assert in_gvisor["guest"]["values"]["days"] == 1461
    assert in_machine["guest"] == in_gvisor["guest"]
    assert in_machine["host"]["sandbox"]["template_digest"] == in_gvisor["host"]["sandbox"]["template_digest"]
    assert picture.startswith(b"\x89PNG")
    assert same == picture
