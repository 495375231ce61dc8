"""A disk of 64 MB that fills up while a run trains on it: no damaged checkpoint, a clear pause, the same weights.

    python benchmarks/disk_full.py [--processes 1] [--json]

A small model is trained (every weight, checkpoints of about 8 MB) once undisturbed, and then once per way of filling a
tmpfs of 64 MB: before a checkpoint, to the last byte (the log finds no room either), behind the back of the look at the
free space, as a quota does it, and with a stop signal while the run waits. All the while another thread reads every
checkpoint that has its name and compares its hashes. The space is freed a moment after the run has said that it waits;
the run must then end by itself (after the stop: be resumed) with the weights and the log of the undisturbed one.

With `--processes 2` the runs are two processes that train under FSDP, and each writes its part of a checkpoint.

Mounting needs root or a user namespace (`unshare`). Where neither is to be had this says so and exits with 77.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

MEGABYTES = 64
SKIPPED = 77
"""What automake's tests exit with where they cannot run."""
INSIDE = "--inside-a-namespace"
FILL_AT = 3
"""The step after which the disk is filled; checkpoints come every second."""
WAYS = ("before a checkpoint", "to the last byte", "unseen, like a quota", "stopped while it waits")
UNDISTURBED = "undisturbed"
STOPPED = 75
"""What a process exits with that was stopped, or lost the one that was."""
SHAPE = {"hidden_size": 192, "intermediate_size": 448}
FREED_AFTER = 0.3


class Watcher(threading.Thread):
    """Reads all checkpoints again and again, and remembers every fault of one that has its name."""

    def __init__(self, checkpoints: Path) -> None:
        super().__init__(daemon=True)
        self.checkpoints, self.faults, self.looks, self.done = checkpoints, [], 0, threading.Event()

    def run(self) -> None:
        from surefit.checkpoint.files import find_checkpoint_damage, list_steps

        while not self.done.is_set():
            for _, path in list_steps(self.checkpoints):
                with contextlib.suppress(FileNotFoundError):  # deleted while it was read
                    fault = find_checkpoint_damage(path, hashes=True)
                    if fault and path.exists():
                        self.faults.append(f"{path.name}: {fault}")
            self.looks += 1
            time.sleep(0.002)


def fill(hog: Path, leave: int) -> None:
    """Take all of the disk but `leave` bytes."""
    with open(hog, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    if leave:
        os.truncate(hog, max(0, hog.stat().st_size - leave))


def disturbed(base: Path, disk: Path, way: str, processes: int) -> dict[str, Any]:
    """Train on the small disk, filled in one of the `WAYS`."""
    said = disk.parent / "said.json"
    faults: list[str] = []
    looks = 0
    for resume in (False, True):
        wait = in_processes(processes, partial(train, base, disk, way, said), resume)
        watcher = Watcher(disk / "run/checkpoints")  # started after the fork, which takes no threads along
        watcher.start()
        wait()
        watcher.done.set()
        watcher.join()
        faults, looks = faults + watcher.faults, looks + watcher.looks
        found = json.loads(said.read_text())
        if not found["interrupted"]:
            break
        (disk / "hog").unlink(missing_ok=True)
    return {"way": way, **found, "faults": faults, "looks": looks}


def train(base: Path, disk: Path, way: str, said: Path, resume: bool, world: Any) -> None:
    """As one of the processes; the first fills the disk, and writes down what it was told."""
    import tiny_run
    import torch

    from surefit.core.errors import Interrupted
    from surefit.parallel.engine import build_engine

    torch.set_num_threads(1)
    out, hog = disk / "run", disk / "hog"
    pauses: list[str] = []

    def on_progress(progress: Any) -> None:
        if progress.step == FILL_AT and not resume and way != UNDISTURBED:
            fill(hog, 0 if way == "to the last byte" else 1 << 20)

    def on_note(text: str) -> None:
        if text.startswith("PAUSED"):
            pauses.append(text)
            what: Callable[[], object] = hog.unlink
            if way == "stopped while it waits":
                what = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
            threading.Timer(FREED_AFTER, what).start()

    made = settings(base, out, world.size)
    told = {"on_progress": on_progress, "on_note": on_note} if world.is_first else {}
    training = tiny_run.training(made, engine=build_engine(made.parallel, world), **told)
    if way == "unseen, like a quota":
        training.saving.guard.free = lambda directory: 1 << 40
    interrupted = ""
    try:
        training.fit(resume)
    except Interrupted as error:
        interrupted = str(error)
    if world.is_first and not resume:
        said.write_text(json.dumps({"pauses": pauses, "interrupted": interrupted}))
    if interrupted:
        os._exit(STOPPED)  # without a word to the others: they notice


def in_processes(count: int, work: Callable[[bool, Any], None], resume: bool) -> Callable[[], None]:
    """Start the processes of a run as forks of this one; returns what waits for them."""
    from surefit.core.errors import LostProcess
    from surefit.parallel.process_group import World, process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = []
    for rank in range(count):
        number = os.fork()
        if number == 0:
            place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in place.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
            try:
                world = World(rank, count, rank, count)
                with process_group(world, 1.0):
                    work(resume, world)
            except LostProcess:
                os._exit(STOPPED)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
            os._exit(0)
        numbers.append(number)

    def wait() -> None:
        codes = {os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers}
        assert codes in ({0}, {STOPPED}), codes

    return wait


def settings(base: Path, out: Path, processes: int) -> Any:
    import tiny_run

    made = tiny_run.config(base, out, kind="full", every=2)
    mode = "single" if processes == 1 else "fsdp"
    return made.model_copy(update={"parallel": made.parallel.model_copy(update={"mode": mode})})


def measure(folder: Path, processes: int) -> list[dict[str, Any]]:
    import tiny_run
    import torch

    from surefit.checkpoint import disk_guard

    torch.set_num_threads(1)
    disk_guard.LOOK_SECONDS = 0.05
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of transformers
        base = tiny_run.save_base(folder / "base", **SHAPE)
        straight = folder / "straight"
        straight.mkdir()
        in_processes(processes, partial(train, base, straight, UNDISTURBED, folder / "said.json"), False)()
        rows = []
        for way in WAYS:
            with small_disk(folder / "disk") as disk:
                row = disturbed(base, disk, way, processes)
                row["equal"] = same(straight / "run", disk / "run")
            right_end = bool(row["interrupted"]) == (way == "stopped while it waits")
            row["passed"] = row["equal"] and right_end and len(row["pauses"]) == 1 and not row["faults"]
            rows.append(row)
    return rows


def same(one: Path, two: Path) -> bool:
    """Whether the weights' files are equal byte by byte, and the logs but for their times."""
    from surefit.core.rundir import read_jsonl

    files = [(out / "model/model.safetensors").read_bytes() for out in (one, two)]
    times = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")
    logs = [
        [{key: value for key, value in line.items() if key not in times} for line in read_jsonl(out / "metrics.jsonl")]
        for out in (one, two)
    ]
    return files[0] == files[1] and logs[0] == logs[1]


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def in_a_namespace() -> None:
    """Start again where this process may mount; does not return. Fails where the system allows it to nobody."""
    try:
        os.execvp("unshare", ["unshare", "-Urm", sys.executable, *sys.argv, INSIDE])
    except OSError as error:
        raise PermissionError(f"unshare: {error.strerror}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(INSIDE, action="store_true", dest="inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "probe"):
                pass
        except PermissionError as error:
            if options.inside or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
                print(f"SKIPPED: no tmpfs can be mounted here ({error}): run this as root", file=sys.stderr)
                raise SystemExit(SKIPPED) from None
            in_a_namespace()
        rows = measure(Path(folder), options.processes)
    passed = all(row["passed"] for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "seconds": round(time.monotonic() - began, 1), "passed": passed}))
    else:
        for row in rows:
            print(f"{row['way']}: {'passed' if row['passed'] else 'FAILED'}")
            print(f"  paused {len(row['pauses'])} time(s): {row['pauses'][0] if row['pauses'] else '-'}")
            if row["interrupted"]:
                print(f"  left with: {row['interrupted']}")
            print(f"  checkpoints read {row['looks']} times: {row['faults'] or 'none damaged'}")
            print(f"  weights and log {'equal to' if row['equal'] else 'DIFFER FROM'} the undisturbed run's")
        print(f"{'PASSED' if passed else 'FAILED'} in {time.monotonic() - began:.1f} s")
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
