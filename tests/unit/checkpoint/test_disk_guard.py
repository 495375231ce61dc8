"""A full disk makes a write wait: nothing else."""

from pathlib import Path

import pytest

from surefit.checkpoint.disk_guard import LOOK_SECONDS, RESERVE, DiskGuard, free_bytes
from surefit.core.errors import Interrupted, MachineError
from surefit.core.units import MIB


class Disk:
    """A disk whose free space changes while a guard sleeps, and the guard's clock."""

    def __init__(self, *free: int) -> None:
        self.free, self.now, self.signal = list(free), 0.0, None
        self.notes: list[str] = []
        self.guard = DiskGuard(
            Path("/runs/a"), self.notes.append, lambda: self.signal, lambda: "step-2 is complete",
            free=lambda directory: self.free[0], sleep=self.sleep, clock=lambda: self.now,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert len(self.free) > 1, "it would wait for ever"
        self.free.pop(0)


def full(path: str = "x") -> MachineError:
    error = MachineError("cannot write", path=path)
    error.__cause__ = OSError(28, "No space left on device")
    return error


def test_where_there_is_room_it_just_writes() -> None:
    disk = Disk(10 * MIB + RESERVE)
    assert disk.guard.write("step-4", 10 * MIB, lambda: "written") == "written"
    assert disk.notes == []
    assert disk.guard.paused_seconds == 0


def test_it_prunes_first_and_waits_for_nothing_if_that_is_enough() -> None:
    disk = Disk(5 * MIB)
    pruned = []

    def prune() -> None:
        pruned.append(True)
        disk.free[0] = 12 * MIB

    disk.guard.write("step-4", 10 * MIB, lambda: None, prune)
    assert pruned == [True]
    assert disk.notes == []


def test_it_pauses_says_what_is_needed_and_goes_on() -> None:
    disk = Disk(5 * MIB, 5 * MIB, 6 * MIB, 20 * MIB)
    assert disk.guard.write("step-4", 10 * MIB, lambda: 7) == 7
    paused, went_on = disk.notes
    assert paused.startswith("PAUSED: step-4 needs 11.0 MiB in /runs/a, and 5.0 MiB are free.")
    assert "Delete something" in paused
    assert paused.endswith("step-2 is complete")
    assert went_on == "space is available again after 6.0 s: writing step-4"
    assert disk.guard.paused_seconds == 3 * LOOK_SECONDS


def test_a_write_that_meets_a_full_disk_all_the_same_is_tried_again() -> None:
    disk = Disk(90 * MIB, 90 * MIB, 90 * MIB)
    tries = []

    def write() -> None:
        tries.append(disk.now)
        if len(tries) < 3:
            raise full()

    disk.guard.write("step-4", MIB, write)
    assert tries == [0, LOOK_SECONDS, 2 * LOOK_SECONDS], "it must wait between two tries"
    assert len(disk.notes) == 2
    assert "the system denied it with 90.0 MiB free (a quota?)" in disk.notes[0]


def test_another_error_is_not_waited_out() -> None:
    def write() -> None:
        raise MachineError("cannot write: Permission denied") from PermissionError(13, "Permission denied")

    with pytest.raises(MachineError, match="Permission denied"):
        Disk(90 * MIB).guard.write("step-4", MIB, write)


def test_a_stop_signal_leaves_the_pause() -> None:
    disk = Disk(0, 0)
    disk.signal = "SIGTERM"
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM while waiting .* step-4; step-2 is complete") as caught:
        disk.guard.write("step-4", MIB, lambda: None)
    assert caught.value.exit_code == 75
    assert disk.now == 0, "a signal that was there before is not slept over"


def test_the_ledger_before_the_run() -> None:
    Disk(100 * MIB).guard.require(4 * MIB, 10 * MIB, 3, 5 * MIB)
    short = Disk(30 * MIB)
    short.guard.require(4 * MIB, 10 * MIB, 3, 5 * MIB)
    assert "3 checkpoints of 10.0 MiB at a time and a result of 5.0 MiB: 30.0 MiB are free" in short.notes[0]
    with pytest.raises(MachineError, match=r"only 9\.0 MiB are free") as caught:
        Disk(9 * MIB).guard.require(4 * MIB, 10 * MIB, 3, 5 * MIB)
    assert caught.value.field == "output_dir"


def test_free_space_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.1)
