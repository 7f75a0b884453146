"""Control groups against a pretended kernel and, where this machine allows it, the real one; files that are really cold."""

import mmap
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vismoe.bench import limits
from vismoe.bench.job import Job
from vismoe.bench.limits import GroupReport, Groups, cached_bytes, drop_caches
from vismoe.bench.run import run_job
from vismoe.errors import ConfigError

MIB = 2**20
V1_FILES = {"memory.limit_in_bytes": "9", "memory.memsw.limit_in_bytes": "9", "memory.max_usage_in_bytes": "4096"}
V1_FILES |= {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}
V2_FILES = {"memory.max": "max", "memory.swap.max": "max", "memory.peak": "8192", "memory.events": "low 0\noom 1\noom_kill 1\n"}


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A folder in which new groups appear with the files of a version, as under /sys/fs/cgroup, and can be removed with them."""

    class Kernel:
        root, self_file, files = tmp_path / "cgroup", tmp_path / "self", V1_FILES
        refuses: OSError | None = None

        def mounted(self, lines: str, *folders: str) -> None:
            self.self_file.write_text(lines)
            for folder in folders:
                os.makedirs(self.root / folder)

        def mkdir(self, path: Path) -> None:
            if self.refuses:
                raise self.refuses
            os.mkdir(path)
            for name, text in self.files.items():
                (path / name).write_text(text)

        def groups(self, nbytes: int = 64 * MIB) -> Groups:
            return Groups(nbytes, self.root, self.self_file)

        def left(self) -> list[Path]:
            return list(self.root.rglob("vismoe-*"))

    pretended = Kernel()
    monkeypatch.setattr(Path, "mkdir", lambda path: pretended.mkdir(path))
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return pretended


def test_version_1_bounds_memory_and_swap_inside_the_group_of_this_process(kernel):
    kernel.mounted("5:cpu:/\n4:memory:/slice/mine\n0::/\n", "memory/slice/mine")
    groups = kernel.groups()
    group = groups.make()
    assert groups.how == "memory control group version 1"
    assert group.folder.parent == kernel.root / "memory/slice/mine"
    assert [(group.folder / name).read_text() for name in list(V1_FILES)[:2]] == [str(64 * MIB)] * 2
    assert group.report() == GroupReport(4096, 2)
    group.remove()
    assert kernel.left() == []


@pytest.mark.parametrize(("delegated", "home"), [("slice/mine", "slice/mine"), ("slice", "slice")])
def test_version_2_makes_a_child_or_beside_a_group_that_holds_processes_a_sibling(kernel, delegated, home):
    kernel.mounted("0::/slice/mine\n", "slice/mine")
    kernel.files = V2_FILES
    for folder in ("slice", "slice/mine"):
        (kernel.root / folder / "cgroup.subtree_control").write_text("cpu memory" if folder == delegated else "cpu")
    group = kernel.groups().make()
    assert group.folder.parent == kernel.root / home
    assert [(group.folder / name).read_text() for name in list(V2_FILES)[:2]] == [str(64 * MIB), "0"]
    assert group.report() == GroupReport(8192, 1)


def test_a_command_joins_its_group_before_it_becomes_itself(kernel):
    kernel.mounted("4:memory:/\n", "memory")
    group = kernel.groups().make()
    done = subprocess.run(group.command([sys.executable, "-c", "import os; print(os.getpid())"]), capture_output=True, text=True)
    assert done.stdout == (group.folder / "cgroup.procs").read_text()


def test_a_limit_that_cannot_be_written_leaves_no_group_behind(kernel, monkeypatch):
    kernel.mounted("4:memory:/\n", "memory")
    kernel.files = {"memory.limit_in_bytes": "9"}
    write = Path.write_text

    def refuse(path, text):
        if text == str(64 * MIB):
            raise OSError(22, "Invalid argument")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="Invalid argument"):
        kernel.groups()
    assert kernel.left() == []


def test_a_group_that_no_process_may_enter_is_none(kernel, monkeypatch):
    kernel.mounted("4:memory:/\n", "memory")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(limits, "ENTER", "echo not allowed >&2; exit 1")
    with pytest.raises(ConfigError, match="version 1: not allowed"):
        kernel.groups()
    assert kernel.left() == []


def test_where_nothing_is_allowed_the_limit_is_refused_with_every_reason(kernel, monkeypatch):
    kernel.mounted("4:memory:/\n", "memory")
    kernel.refuses = PermissionError(13, "Permission denied")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"64\.0 MiB cannot be enforced.*: Permission denied; systemd user scope: .*Fix"):
        kernel.groups()


@pytest.mark.parametrize("works", [True, False])
def test_systemd_is_asked_where_groups_cannot_be_made(kernel, monkeypatch, tmp_path, works):
    kernel.mounted("")
    program = tmp_path / "bin" / "systemd-run"
    os.makedirs(program.parent)
    body = f'echo "$@" > {tmp_path}/asked; while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    program.write_text(f"#!/bin/sh\n{body if works else 'echo no bus >&2; exit 1'}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    if not works:
        with pytest.raises(ConfigError, match="systemd user scope: no bus"):
            kernel.groups()
        return
    groups = kernel.groups()
    assert groups.how == "systemd user scope"
    assert subprocess.run(groups.make().command(["echo", "ran"]), capture_output=True, text=True).stdout == "ran\n"
    assert f"MemoryMax={64 * MIB}" in (tmp_path / "asked").read_text()


def test_without_a_limit_the_command_stays_as_it_is(kernel):
    group = Groups(None).make()
    assert group.command(["true"]) == ["true"] and group.report() == GroupReport(None, None)


# ------------------------------------------------------------------ the real thing
def test_a_worker_that_takes_more_than_the_limit_is_killed_and_reported_with_its_peak():
    try:
        groups = Groups(64 * MIB)
    except ConfigError as error:
        pytest.skip(f"no control group can be made here: {error}")
    hog = (sys.executable, "-c", "hog = bytearray(b'x') * (300 << 20)")
    found = run_job(Job("vismoe", "", "", "cpu", (), 2, 0, 1, 0), groups, hog)
    assert found["failed"].startswith("killed by the memory limit of 64.0 MiB")
    assert found["peak_bytes"] is None or 48 * MIB < found["peak_bytes"] <= 64 * MIB
    assert not [folder for folder, _ in limits.homes() if list(folder.glob(f"vismoe-bench-{os.getpid()}-*"))]


def in_memory(path: Path) -> bool:
    """Whether the file system has no disk below it, so that its pages are the file."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


def test_dropped_files_are_cold_and_what_is_mapped_elsewhere_is_said(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(4 * MIB + 5))
    if in_memory(tmp_path):
        pytest.skip(f"{tmp_path} lies in memory: nothing can be dropped")
    assert cached_bytes(file) >= 4 * MIB
    assert drop_caches([file]) == cached_bytes(file) == 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert drop_caches([file]) >= 4 * MIB


def test_an_empty_file_has_nothing_cached(tmp_path):
    (tmp_path / "empty").touch()
    assert drop_caches([tmp_path / "empty"]) == 0
