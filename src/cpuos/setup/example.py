"""What the example analyses: daily weather in Seattle, 2012 to 2015, out of the PyPI package vega-datasets."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from cpuos.errors import SetupRequired
from cpuos.setup.host import Host
from cpuos.setup.uv import uv_path

__all__ = ["example_is_there", "fetch_example"]

_WHEEL = "vega-datasets==0.9.0"
_FILE = "seattle-weather.csv"
_SHA256 = "62f0609f787158128aa2bd102967173a4953122dd4f872bf1d502cae1037df0b"


def example_is_there(host: Host) -> bool:
    """Whether the table is there, unchanged."""
    try:
        return hashlib.sha256(_target(host).read_bytes()).hexdigest() == _SHA256
    except OSError:
        return False


def fetch_example(host: Host) -> None:
    """Download the package, keep the table."""
    folder = host.settings.cache_dir / "vega-datasets"
    shutil.rmtree(folder, ignore_errors=True)
    variables = {"UV_CACHE_DIR": str(host.settings.cache_dir / "uv-cache")}
    install = [uv_path(host), "pip", "install", "--quiet", "--no-deps", "--target", folder, _WHEEL]
    host.run(install, env=variables, network=True)
    target = _target(host)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "vega_datasets" / "_data" / _FILE, target)
    shutil.rmtree(folder)
    if not example_is_there(host):
        raise SetupRequired(f"cannot use {target}", f"its checksum is not {_SHA256}", hint=f"rm {target} && make demo")


def _target(host: Host) -> Path:
    return host.settings.cache_dir / "examples" / _FILE
