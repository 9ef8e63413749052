"""How much memory the machine gives: the least of what the machine has and what limits leave."""

import os
import sys
from typing import ClassVar

import pytest
from own_process import output_of

resource = pytest.importorskip("resource")  # POSIX
if not sys.platform.startswith("linux"):
    pytest.skip("limits are read from /proc and /sys", allow_module_level=True)

from keras_remat.backends import host  # noqa: E402
from keras_remat.units import GIB, MIB  # noqa: E402

PAGE = os.sysconf("SC_PAGE_SIZE")
MACHINE = os.sysconf("SC_PHYS_PAGES") * PAGE


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets what the system says: what is left of the machine, files of a control group, the limit,
    what is mapped, cores."""

    def says(address_space=resource.RLIM_INFINITY, mapped=0, cores=1, left=None, **files):
        texts = {
            "/proc/meminfo": left and f"MemTotal: 1 kB\nMemAvailable: {left // 1024} kB\nHuge: 0",
            "/proc/self/statm": f"{mapped // PAGE} 1 1 1 0 1 0",
            "/sys/fs/cgroup/memory.max": files.get("second"),
            "/sys/fs/cgroup/memory.current": files.get("used"),
            "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {files.get('cached', 0)}",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": files.get("first"),
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": files.get("used"),
            "/sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {files.get('cached', 0)}",
        }

        def path(name):
            stand_in = tmp_path / name.strip("/").replace("/", "_")
            stand_in.unlink(missing_ok=True)
            if texts[name] is not None:
                stand_in.write_text(f"{texts[name]}\n")
            return stand_in

        monkeypatch.setattr(host, "Path", path)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (address_space, address_space))
        monkeypatch.setattr(host, "cores", lambda: cores)

    says()
    return says


def test_where_nothing_else_is_told_it_is_the_machine_s_memory(machine):
    assert host.machine_bytes() == MACHINE
    assert host.host_memory_bytes(0) == 31 * (MACHINE // 32)


def test_what_other_processes_python_and_data_take_is_not_there(machine):
    """It counts in steps of a 32nd of the machine's memory, one of which stays free."""
    machine(left=MACHINE // 2 + MIB)
    assert host.host_memory_bytes(0) == 15 * (MACHINE // 32)
    machine(left=MACHINE // 2 - MIB)
    assert host.host_memory_bytes(0) == 14 * (MACHINE // 32)
    assert host.host_memory_bytes(2 * MIB) == 15 * (MACHINE // 32)


@pytest.mark.parametrize("held", [0, MACHINE])
def test_it_is_more_than_nothing_and_no_more_than_the_machine_has(machine, held):
    machine(left=1024)
    assert host.host_memory_bytes(held) == (31 if held else 1) * (MACHINE // 32)


@pytest.mark.parametrize("version", ["first", "second"])
def test_what_a_container_has_left_counts(machine, version):
    machine(**{version: 320 * MIB})
    assert host.host_memory_bytes(0) == 310 * MIB
    machine(**{version: 320 * MIB}, used=120 * MIB)
    assert host.host_memory_bytes(0) == 190 * MIB
    machine(**{version: 320 * MIB}, used=120 * MIB, cached=20 * MIB)
    assert host.host_memory_bytes(0) == 210 * MIB
    assert host.host_memory_bytes(50 * MIB) == 260 * MIB


@pytest.mark.parametrize("unlimited", ["max", 2**63 - 4096])
def test_a_container_without_a_limit_has_the_machine_s_memory(machine, unlimited):
    machine(first=unlimited, second=unlimited)
    assert host.host_memory_bytes(0) == 31 * (MACHINE // 32)


def test_of_an_address_space_a_tenth_and_room_for_threads_are_left_out(machine):
    machine(address_space=2 * GIB, mapped=1 * GIB, cores=2)
    left = GIB - GIB // 10 - (64 + 2 * 32) * MIB
    assert host.host_memory_bytes(0) == left
    machine(address_space=2 * GIB, mapped=1 * GIB, cores=4)
    assert host.host_memory_bytes(0) == left - 2 * 32 * MIB


def test_what_tensors_take_counts_as_available(machine):
    machine(address_space=2 * GIB, mapped=1 * GIB)
    free = host.host_memory_bytes(0)
    assert host.host_memory_bytes(100 * MIB) == free + 100 * MIB


def test_an_address_space_that_is_used_up_leaves_what_tensors_take(machine):
    machine(address_space=GIB, mapped=2 * GIB)
    assert host.host_memory_bytes(7) == 7


_LIMITED = """
import resource
from pathlib import Path
from keras_remat.backends import host
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
unlimited = host.host_memory_bytes(0)
most = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (mapped + 500 * 2**20, most))
print(unlimited, host.host_memory_bytes(0))
"""


def test_the_system_is_asked_for_the_limit_and_for_what_is_mapped():
    """In a process of its own, because the limit would hit everything that runs after it."""
    unlimited, limited = map(int, output_of("-c", _LIMITED).split())
    assert unlimited > 600 * MIB
    left = max(0, 450 * MIB - (64 + 32 * host.cores()) * MIB)
    assert limited == pytest.approx(left, abs=8 * MIB)


def test_the_least_of_all_limits_counts(machine):
    machine(address_space=2 * GIB, mapped=1 * GIB, second=64 * MIB)
    assert host.host_memory_bytes(0) == 62 * MIB
    machine(address_space=GIB, mapped=GIB - 200 * MIB, second=500 * MIB)
    assert host.host_memory_bytes(0) == 180 * MIB - 96 * MIB


# ------------------------------------------------------------------ cores


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert host.cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_where_nobody_tells_cores_are_all_of_them(monkeypatch, counted, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert host.cores() == expected


# ------------------------------------------------------------------ room for threads


class Mapping:
    """Stands for an anonymous mapping; ``all`` are those that were made."""

    all: ClassVar[list["Mapping"]] = []
    room: ClassVar[int] = 2**62

    def __init__(self, descriptor, nbytes):
        assert descriptor == -1, "no file"
        if nbytes > self.room:
            raise OSError("Cannot allocate memory")
        self.nbytes, self.is_open = nbytes, True
        self.all.append(self)

    def close(self):
        self.is_open = False


@pytest.fixture
def mappings(monkeypatch):
    monkeypatch.setattr(Mapping, "all", [])
    monkeypatch.setattr(host.mmap, "mmap", Mapping)
    return Mapping


def test_room_for_threads_is_kept_inside_and_given_back(machine, mappings):
    machine(address_space=GIB, cores=3)
    with host.address_space_for_threads():
        (kept,) = mappings.all
        assert kept.nbytes == (64 + 3 * 32) * MIB
        assert kept.is_open
    assert not kept.is_open


def test_it_is_given_back_after_an_error(machine, mappings):
    machine(address_space=GIB)
    with pytest.raises(KeyError), host.address_space_for_threads():
        raise KeyError
    assert [kept.is_open for kept in mappings.all] == [False]


def test_without_a_limit_nothing_is_kept(machine, mappings):
    with host.address_space_for_threads():
        assert mappings.all == []


def test_less_room_than_is_wanted_is_no_error(machine, mappings, monkeypatch):
    machine(address_space=GIB)
    monkeypatch.setattr(mappings, "room", 95 * MIB)
    with host.address_space_for_threads():
        assert mappings.all == []
