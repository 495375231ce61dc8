"""Disks, file systems, limits and ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefit.core.errors import MachineError
from surefit.doctor import places
from surefit.doctor.probe import Probe


def named(found: Iterator[Probe], name: str) -> Probe:
    return next(probe for probe in found if probe.name == name)


def test_a_full_disk_and_one_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "disk_free_bytes", lambda place: 10**9)
    assert places._disk("d", tmp_path / "later").verdict == "warn"
    monkeypatch.setattr(places, "disk_free_bytes", lambda place: 0)
    assert places._disk("d", tmp_path).verdict == "fail"
    if Path("/proc").is_dir():
        assert "not writable" in places._disk("d", Path("/proc/surefit")).fact


def test_the_run_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    (probe,) = places.file_system_probes(tmp_path / "runs")
    assert "fsync and atomic rename work" in probe.fact
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_rename_or_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SLOW_SYNC", -1.0)
    assert next(places.file_system_probes(tmp_path)).verdict == "warn"

    def refuse(path: Path, content: str) -> None:
        raise MachineError("cannot be written: Operation not permitted", path=path)

    monkeypatch.setattr(places, "write_atomic", refuse)
    (probe,) = places.file_system_probes(tmp_path)
    assert probe.verdict == "fail"
    assert "not permitted" in probe.fact


def test_the_mount_that_holds_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/user\\040one/tmp tmpfs rw 0 0\nodd\n"
    )
    monkeypatch.setattr(places, "MOUNTS", mounts)
    found = {
        place: places.file_system_type(Path(place))
        for place in ("/srv", "/home/user", "/homely", "/home/user one/tmp/runs")
    }
    assert found == {"/srv": "ext4", "/home/user": "nfs4", "/homely": "ext4", "/home/user one/tmp/runs": "tmpfs"}
    monkeypatch.setattr(places, "MOUNTS", tmp_path / "none")
    assert places.file_system_type(Path("/srv")) == "unknown"


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 2048))
    assert named(places.limit_probes(), "open files") == Probe(
        "open files", "256 per process", "warn", "ulimit -n 2048", True
    )
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert named(places.limit_probes(), "open files").verdict == "ok"
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(places, "SMALL_SHARED", 2**62)
    assert named(places.limit_probes(), "shared memory").verdict == "warn"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(places, "TORCHRUN_PORT", listener.getsockname()[1])
        (probe,) = places.port_probes()
    assert probe.verdict == "warn"
    assert probe.is_command
    assert probe.fix is not None
    assert probe.fix.removeprefix("export MASTER_PORT=").isdecimal()
    (probe,) = places.port_probes()
    assert probe.verdict == "ok"
