"""What a guest was told of names, kept over the end of the forwarder and of the daemon."""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cpuos.node.network.policy_rules import NamedAddress
from cpuos.node.network.told import ToldNames, names_file, remove_names_file


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(name: str, address: str, ttl_s: int = 60) -> NamedAddress:
    return NamedAddress(name=name, address=IPv4Address(address), ttl_s=ttl_s)


def teach(names: ToldNames, *entries: NamedAddress) -> None:
    names.add(entries)
    names.save(entries)


def test_a_later_daemon_has_it_with_the_seconds_that_are_left(tmp_path: Path) -> None:
    clock = Clock()
    first = ToldNames(tmp_path, clock=clock)
    teach(first, told("a.example", "1.2.3.4", 60), told("b.example", "1.2.3.4", 10))
    teach(first, told("a.example", "1.2.3.5", 0))
    clock.now += 25
    later = ToldNames(tmp_path, clock=clock)
    later.load()
    assert later.all() == [
        told("a.example", "1.2.3.4", 35),
        told("b.example", "1.2.3.4", 0),
        told("a.example", "1.2.3.5", 0),
    ]
    assert later.by_address() == {
        IPv4Address("1.2.3.4"): ("a.example", "b.example"),
        IPv4Address("1.2.3.5"): ("a.example",),
    }


def test_a_longer_time_counts_and_a_shorter_one_takes_nothing_away(tmp_path: Path) -> None:
    names = ToldNames(tmp_path, clock=Clock())
    teach(names, told("a.example", "1.2.3.4", 60))
    teach(names, told("a.example", "1.2.3.4", 5))
    assert names.all() == [told("a.example", "1.2.3.4", 60)]
    teach(names, told("a.example", "1.2.3.4", 600))
    assert names.all() == [told("a.example", "1.2.3.4", 600)]


def test_nothing_told_makes_no_file_and_the_folder_can_be_emptied(tmp_path: Path) -> None:
    names = ToldNames(tmp_path, clock=Clock())
    names.load()
    names.save_all()
    assert list(tmp_path.iterdir()) == []
    teach(names, told("a.example", "1.2.3.4"))
    names.save_all()
    assert list(tmp_path.iterdir()) == [names_file(tmp_path)]
    remove_names_file(tmp_path)
    remove_names_file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_within_a_line_and_one_of_nonsense(tmp_path: Path) -> None:
    names_file(tmp_path).write_bytes(
        b"1060 a.example 1.2.3.4\nnonsense\n99 b.example 999.1.1.1\n1060 ; 1.1.1.1\n\0\n1060 c.exa"
    )
    names = ToldNames(tmp_path, clock=Clock())
    names.load()
    assert names.all() == [told("a.example", "1.2.3.4", 60)]


def test_file_and_memory_are_bounded(tmp_path: Path) -> None:
    names = ToldNames(tmp_path, clock=Clock())
    for number in range(300):
        entries = [told(f"n{number}.example", f"9.{number >> 8}.{number & 255}.{n}") for n in range(64)]
        teach(names, *entries)
    assert len(names.all()) == 2048
    assert len(names.by_address()) == 2048
    assert names.all()[-1] == told("n299.example", "9.1.43.63")
    assert names_file(tmp_path).stat().st_size < 200_000
    later = ToldNames(tmp_path, clock=Clock())
    later.load()
    assert later.all() == names.all()


_ENTRIES = st.lists(
    st.builds(
        told,
        st.sampled_from(["a.example", "b.example", "c"]),
        st.sampled_from(["1.2.3.4", "5.6.7.8"]),
        st.integers(0, 99),
    ),
    max_size=30,
)


@given(_ENTRIES)
def test_what_is_read_is_what_was_written(tmp_path_factory, entries: list[NamedAddress]) -> None:
    folder = tmp_path_factory.mktemp("slot")
    names = ToldNames(folder, clock=Clock())
    for entry in entries:
        teach(names, entry)
    later = ToldNames(folder, clock=Clock())
    later.load()
    assert {(one.name, one.address, one.ttl_s) for one in later.all()} == {
        (one.name, one.address, one.ttl_s) for one in names.all()
    }
