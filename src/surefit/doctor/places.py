"""The places that runs use: disks, file systems, limits, shared memory and ports."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.rundir import write_atomic
from surefit.core.units import GIB, MIB, bytes_text
from surefit.doctor.probe import Probe
from surefit.facts.hardware import disk_free_bytes, nearest_existing

LOW_DISK, NO_DISK = 10 * GIB, GIB // 2
SLOW_SYNC = 1.0
"""Seconds to write a kilobyte safely to disk, above which checkpoints delay training."""
FEW_FILES = 1024
SMALL_SHARED = 256 * MIB
"""Docker gives a container 64 MiB of /dev/shm, too little for NCCL and for DataLoader workers."""
TORCHRUN_PORT = 29500
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs", "fuse.glusterfs"}
)
MOUNTS = Path("/proc/mounts")
SHARED_MEMORY = Path("/dev/shm")


def disk_probes() -> Iterator[Probe]:
    """Yield probes of space and permission where runs, models and tokenized data are written."""
    places = {"working directory": Path.cwd(), "model cache": env.hub_cache(), "surefit cache": env.cache_dir()}
    for name, place in places.items():
        yield _disk(name, place)


def _disk(name: str, place: Path) -> Probe:
    existing = nearest_existing(place)
    fact = f"{place}, {bytes_text(disk_free_bytes(place))} free"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".surefit-probe-"):
            pass
    except OSError as error:
        return Probe(name, f"{fact}, not writable: {error.strerror}", "fail", f"get write permission for {existing}")
    free = disk_free_bytes(place)
    if free < LOW_DISK:
        return Probe(name, fact, "fail" if free < NO_DISK else "warn", f"free some space on the disk of {existing}")
    return Probe(name, fact)


def file_system_probes(folder: Path | None = None) -> Iterator[Probe]:
    """Yield a probe of whether a checkpoint written there survives a crash: fsync and atomic rename, tested."""
    existing = nearest_existing(folder or Path.cwd() / "runs")
    kind = file_system_type(existing)
    where = f"{existing}, {kind}" + (", a network file system" if kind in NETWORK else "")
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".surefit-probe-") as folder_path:
            for text in ("old", "new"):
                write_atomic(Path(folder_path) / "checkpoint", text)
    except (OSError, MachineError) as error:
        advice = "choose an output_dir on a local disk"
        yield Probe("run folder", f"{where}: no safe writing: {env.first_line(error)}", "fail", advice)
        return
    seconds = (time.monotonic() - start) / 2
    fact = f"{where}: fsync and atomic rename work, {1000 * seconds:.0f} ms"
    if seconds > SLOW_SYNC:
        yield Probe(
            "run folder", fact, "warn", "choose an output_dir on a faster disk: training waits for each checkpoint"
        )
    elif kind in ("tmpfs", "ramfs"):
        yield Probe(
            "run folder", fact, "warn", "choose an output_dir on a disk: this one is in RAM and is lost at a restart"
        )
    else:
        yield Probe("run folder", fact)


def file_system_type(place: Path) -> str:
    """Return the kernel's name of the file system that holds `place`: ext4, nfs4, overlay…; "unknown" if it has
    none."""
    best = ("", "unknown")
    with suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split(" ")
            point = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
            if point and place.is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, fields[2])
    return best[1]


def limit_probes() -> Iterator[Probe]:
    """Yield probes of the limit of open files, and of the shared memory."""
    with suppress(ImportError):  # no resource module outside POSIX
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        sufficient = soft == resource.RLIM_INFINITY or soft >= FEW_FILES
        raisable = hard == resource.RLIM_INFINITY or hard >= 4 * FEW_FILES
        fix = f"ulimit -n {4 * FEW_FILES if raisable else hard}"
        fact = f"{soft} per process" if soft != resource.RLIM_INFINITY else "no limit"
        yield Probe("open files", fact) if sufficient else Probe("open files", fact, "warn", fix, True)
    if SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        advice = "start the container with --shm-size=8g or --ipc=host: DataLoader workers and NCCL need it"
        fact = f"{SHARED_MEMORY}, {bytes_text(size)}"
        yield Probe("shared memory", fact) if size >= SMALL_SHARED else Probe("shared memory", fact, "warn", advice)


def port_probes() -> Iterator[Probe]:
    """Yield a probe of whether processes can connect on this machine: a port on the loopback interface, torchrun's if
    free."""
    try:
        free_port = _bind(0)
    except OSError as error:
        yield Probe("port", f"none on 127.0.0.1: {error.strerror}", "fail", "bring the loopback interface up")
        return
    try:
        _bind(TORCHRUN_PORT)
    except OSError as error:
        fact = f"127.0.0.1:{TORCHRUN_PORT}, torchrun's default: {error.strerror}"
        yield Probe("port", fact, "warn", f"export MASTER_PORT={free_port}", True)
    else:
        yield Probe("port", f"127.0.0.1:{TORCHRUN_PORT}, torchrun's default, is free")


def _bind(number: int) -> int:
    """Bind a port and release it, 0 for any; return its number."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", number))
        return int(listener.getsockname()[1])
