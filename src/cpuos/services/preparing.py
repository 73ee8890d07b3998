"""`python -m cpuos.services.preparing`: the folders of an instance, before its node starts (systemd)."""

from __future__ import annotations

from cpuos.services.directories import make_directories
from cpuos.services.ownership import claim_run_dir, require_own_run_dir
from cpuos.settings import load_settings

__all__: list[str] = []

if __name__ == "__main__":
    settings = load_settings()
    require_own_run_dir(settings, verb="up")
    make_directories(settings)
    claim_run_dir(settings)
