"""The probe, with programs in the place of VMMs: only a guest's answer counts, and it is asked for once."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpuos.errors import SetupRequired
from cpuos.runtimes.microvm import probe
from cpuos.runtimes.microvm.launch import Launch, launch
from cpuos.runtimes.microvm.probe import Prober
from cpuos.runtimes.microvm.qemu import Qemu
from cpuos.runtimes.microvm.vmm import Drive, Machine
from cpuos.types.sandbox import Isolation

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ANSWERS = "import hashlib,sys; print('kernel', sys.argv[1]); print(hashlib.sha256(sys.argv[1].encode()).hexdigest())"
ECHOES = "import sys,time; print('Command line: --word', sys.argv[1], flush=True); time.sleep(60)"
SILENT = "import time; time.sleep(60)"
DIES = "import sys; sys.exit('assertion failed')"


class Program:
    """A VMM that is a Python program; its guest gets the word as its argument."""

    name = "program"

    def __init__(self, text: str, *, kvm: bool = False, path: Path = Path("/usr/bin/python3")) -> None:
        self.kvm = kvm
        self.program = path
        self.starts = 0
        self.known_by = self._text = text

    def version(self) -> str:
        return "1.0"

    def overhead_mib(self) -> int:
        return 0

    def command(self, machine: Machine) -> list[str]:
        word = re.search(r"--word ([0-9a-f]+|-)", machine.arguments)
        assert word
        self.starts += word[1] != "-"  # that is how it would be started, asked for to know it again
        text = self.known_by if word[1] == "-" else self._text
        return ["/usr/bin/python3", "-I", "-S", "-c", text, word[1]]

    def launch(self, plan: Launch, machine: Machine, *, control: Path | None = None) -> tuple[int, int]:
        return launch(replace(plan, command=self.command(machine)))

    async def boot(self, control: Path, machine: Machine) -> None:
        pass

    async def ask_state(self, control: Path, *, timeout_s: float) -> str:
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "KVM_BOOT_S", 1.0)
    monkeypatch.setattr(probe, "EMULATED_BOOT_S", 1.0)
    image = tmp_path / "image"
    image.mkdir()
    manifest = {"format": 1, "kernel": "vmlinuz-1", "vmlinux": "sha256:1", "initrd": "sha256:2"}
    (image / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def prober(folder: Path, *vmms: Program, **changes: object) -> Prober:
    return Prober(folder / "image", kept=folder / "kept.json", folder=folder / "work", vmms=vmms, **changes)


async def test_the_first_whose_guest_answers_is_taken(folder):
    best, other = Program(ANSWERS, kvm=True), Program(ANSWERS)
    asked = prober(folder, best, other)
    found = await asked.probe()
    assert (found.available, found.isolation, found.detail) == (True, Isolation.MICROVM, "program 1.0 kvm")
    assert await asked.vmm() is best
    assert other.starts == 0
    assert list((folder / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        (SILENT, "/dev/kvm opens, the machine starts, but the guest prints nothing in 1 s"),
        (ECHOES, "did not come up in 1 s; the last that was said: Command line: --word"),
        (DIES, "did not come up before it ended; the last that was said: assertion failed"),
    ],
)
async def test_a_machine_that_starts_proves_nothing(folder, text, evidence):
    broken, works = Program(text, kvm=True), Program(ANSWERS)
    asked = prober(folder, broken, works)
    found = await asked.probe()
    assert (found.available, found.isolation, found.detail) == (True, Isolation.EMULATED, "program 1.0 tcg")
    first, second = await asked.findings()
    assert evidence in first.evidence
    assert (first.works, second.works) == (False, True)


async def test_nothing_works(folder):
    missing = Program(ANSWERS, path=folder / "not-there")
    found = await prober(folder, missing, Program(SILENT)).probe()
    assert not found.available
    assert f"{missing.program} is not installed" in found.reason
    assert "prints nothing" in found.reason
    with pytest.raises(SetupRequired):
        await prober(folder, missing).vmm()


async def test_no_image(tmp_path):
    found = await Prober(tmp_path, kept=tmp_path / "kept", folder=tmp_path, vmms=[Program(ANSWERS)]).probe()
    assert not found.available
    assert "cpuos setup microvm" in found.reason


async def test_what_was_found_is_kept_until_something_is_another(folder):
    vmm = Program(ANSWERS)
    assert not prober(folder, vmm).is_known()
    await prober(folder, vmm).probe()
    assert prober(folder, vmm).is_known()
    for _ in range(2):
        assert (await prober(folder, vmm).probe()).available
    assert vmm.starts == 1
    await prober(folder, vmm, fresh=True).probe()
    assert vmm.starts == 2
    (folder / "kept.json").write_text("{")
    await prober(folder, vmm).probe()
    assert vmm.starts == 3
    manifest = json.loads((folder / "image" / "manifest.json").read_text())
    (folder / "image" / "manifest.json").write_text(json.dumps(manifest | {"initrd": "sha256:3"}))
    assert not prober(folder, vmm).is_known()
    await prober(folder, vmm).probe()
    assert vmm.starts == 4


async def test_what_set_up_has_seen_counts(folder):
    vmm = Program(ANSWERS)
    await prober(folder, vmm).probe()
    (folder / "kept.json").rename(folder / "image" / "probe.json")
    assert (await prober(folder, vmm).probe()).available
    assert vmm.starts == 1
    assert not (folder / "kept.json").exists()


def test_the_machine_has_what_is_named_and_no_way_to_the_host():
    machine = Machine(
        kernel="/boot/vmlinux",
        initrd="/boot/initrd",
        arguments="CPUOS_SANDBOX=x -- --tasks 4",
        cpu=2,
        memory_mib=512,
        drives=(
            Drive(name="template", descriptor=100, writable=False),
            Drive(name="root", descriptor=101, writable=True),
        ),
        tap=103,
        guest_mac="02:00:0a:00:00:02",
        control=104,
    )
    for kvm in (False, True):
        words = Qemu(kvm=kvm).command(machine)
        text = " ".join(words)
        assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(words)
        assert words[words.index("-sandbox") + 1] == (
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
        )
        assert words[words.index("-monitor") + 1] == words[words.index("-serial") + 1] == "none"
        # Every file is an open descriptor taken as raw bytes: no path, no format that the guest could choose.
        drivers = re.findall(r"-blockdev driver=(\w+)", text)
        assert drivers == ["file", "raw"] * 2
        assert re.findall(r"filename=(\S+?),", text) == ["/dev/fdset/100", "/dev/fdset/101"]
        assert re.findall(r"read-only=(\w+)", text) == ["on", "on", "off", "off"]
        assert ("tsc_early_khz" in text) is not kvm
        assert text.index("tap,id=net,fd=103") < text.index("socket,id=control,fd=104")
        assert sys.executable not in text


async def test_that_nothing_works_is_asked_again(folder):
    """The host may have been busy; set-up is done all the same."""
    broken = Program(DIES)
    asked = prober(folder, broken)
    for starts in (1, 2):
        assert not (await asked.probe()).available
        assert broken.starts == starts
    assert asked.is_known()
    assert not (await prober(folder, broken).probe()).available
    assert broken.starts == 3


async def test_a_stronger_one_that_did_not_answer_in_time_is_asked_again(folder):
    """It was a busy hour when this node came up: what works then is used, and not for ever."""
    slow, weak = Program(SILENT, kvm=True), Program(ANSWERS)
    asked = prober(folder, slow, weak)
    for _ in range(2):
        assert (await asked.probe()).isolation is Isolation.EMULATED
    assert slow.starts == 1
    quick = Program(ANSWERS, kvm=True)
    quick.known_by = SILENT  # the same VMM, as far as can be seen
    assert (await prober(folder, quick, weak).probe()).isolation is Isolation.MICROVM


async def test_of_two_that_are_kept_the_one_that_found_more_counts(folder):
    dies, weak = Program(DIES, kvm=True), Program(ANSWERS)
    await prober(folder, dies, weak).probe()
    kept = json.loads((folder / "kept.json").read_text())
    stronger = kept | {"findings": [{"vmm": "program", "kvm": True, "works": True, "evidence": "a guest answered"}]}
    for first, second in ((kept, stronger), (stronger, kept)):
        (folder / "kept.json").write_text(json.dumps(first))
        (folder / "image" / "probe.json").write_text(json.dumps(second))
        assert (await prober(folder, dies, weak).probe()).isolation is Isolation.MICROVM
    assert dies.starts == 1
