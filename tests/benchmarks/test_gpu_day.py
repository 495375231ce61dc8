"""The driver of the GPU day, with small stages: whatever happens to it, each stage has its line in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DRIVER = BENCHMARKS / "gpu_day.py"
SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def stage(name: str, code: str, limit: float = 20.0, least: float = 0.1) -> dict[str, Any]:
    return {
        "name": name, "what": name, "limit": limit, "least": least, "command": [sys.executable, "-S", "-c", code],
    }  # fmt: skip


def command(out: Path, stages: list[dict[str, Any]], *options: str) -> list[str]:
    out.mkdir(exist_ok=True)
    (out / "stages.json").write_text(json.dumps(stages))
    kit = ["--kit", str(out / "kit")] if "--kit" not in options else []
    own = [sys.executable, str(DRIVER), "--out", str(out), "--stages", str(out / "stages.json"), "--json"]
    return [*own, *kit, *options]


def run(out: Path, stages: list[dict[str, Any]], *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(command(out, stages, *options), capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_stages_end_fail_and_skip_each_with_a_line(tmp_path: Path) -> None:
    stages = [
        stage("good", "print('fine')"),
        stage("bad", "import sys; print('one\\ntwo', file=sys.stderr); sys.exit(9)"),
        stage("no", "print('no GPU'); raise SystemExit(3)"),
        stage("last", "import os; print(os.environ['HF_HUB_OFFLINE'], os.environ['PYTHONPATH'])"),
    ]
    code, found = run(tmp_path, stages)
    assert code == 1
    assert [(line["stage"], line["status"], line["reason"]) for line in found["stages"]] == [
        ("good", "ended", ""), ("bad", "failed", "exit 9: two"), ("no", "skipped", "no GPU"), ("last", "ended", ""),
    ]  # fmt: skip
    assert found["stages"][1]["stderr"] == ["one", "two"]
    assert f"1 {BENCHMARKS.parent / 'src'}{os.pathsep}{tmp_path / 'site'}" in (tmp_path / "logs/last.out").read_text()
    before = (tmp_path / "day.jsonl").read_bytes()
    assert run(tmp_path, stages)[0] == 1
    assert (tmp_path / "day.jsonl").read_bytes() == before, "what has a line is not run again"
    assert run(tmp_path, stages, "--stage", "good,no")[0] == 0


def test_a_stage_that_hangs_is_ended_with_its_children_and_the_next_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); "
    hangs += f"open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    start = time.monotonic()
    code, found = run(tmp_path, [stage("hangs", hangs, limit=2), stage("next", "")])
    assert code == 1
    assert [line["status"] for line in found["stages"]] == ["failed", "ended"]
    assert found["stages"][0]["reason"] == "not done after 2 s"
    assert time.monotonic() - start < 40
    assert gone(int(pid.read_text())), "a session of its own saves nobody"


def test_killed_in_the_middle_it_goes_on_and_says_so(tmp_path: Path) -> None:
    pid, told = tmp_path / "pid", tmp_path / "told"
    slow = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
    slow += f"time.sleep(0 if os.path.exists({str(told)!r}) else 60)"
    stages = [stage("first", ""), stage("slow", slow), stage("last", "")]
    driver = subprocess.Popen(command(tmp_path, stages), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert gone(int(pid.read_text())), "nothing goes on holding the GPU"
    with (tmp_path / "day.jsonl").open("ab") as file:
        file.write(b'{"stage": "slow", "sta')
    told.touch()
    code, found = run(tmp_path, stages)
    assert code == 0
    assert [(line["stage"], line["status"], line["again"]) for line in found["stages"]] == [
        ("first", "ended", False), ("slow", "ended", True), ("last", "ended", False),
    ]  # fmt: skip


def test_what_is_killed_twice_is_not_run_a_third_time(tmp_path: Path) -> None:
    with (tmp_path / "started.jsonl").open("w") as file:
        file.write('{"stage": "deadly", "event": "started"}\n' * 2)
    code, found = run(tmp_path, [stage("deadly", "raise SystemExit('run')"), stage("next", "")])
    assert code == 1
    assert [line["reason"] for line in found["stages"]] == ["it was killed each time", ""]


@pytest.mark.slow
def test_the_minutes_are_kept_and_the_stage_goes_on_another_time(tmp_path: Path) -> None:
    stages = [stage("first", ""), stage("long", SLEEPS, limit=6), stage("last", "")]
    start = time.monotonic()
    code, found = run(tmp_path, stages, "--minutes", "0.06")
    assert time.monotonic() - start < 20
    assert found["seconds"] <= 3.6
    assert (code, found["left"]) == (3, ["long", "last"])
    code, found = run(tmp_path, stages, "--minutes", "1")
    assert (code, found["left"]) == (1, [])
    line = found["stages"][1]
    assert (line["reason"], line["again"]) == ("not done after 6 s", False)
    assert line["seconds"] < 8, "the time of both calls together"


def test_two_days_do_not_share_a_folder(tmp_path: Path) -> None:
    started = tmp_path / "started"
    waits = f"import time; open({str(started)!r}, 'w').write('x'); time.sleep(60)"
    first = subprocess.Popen(command(tmp_path, [stage("waits", waits)]), stderr=subprocess.DEVNULL)
    wait_for(started)
    second = subprocess.run(command(tmp_path, []), capture_output=True, text=True, check=False)
    assert "at work in it" in second.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 128 + signal.SIGTERM
    events = [json.loads(line)["event"] for line in (tmp_path / "started.jsonl").read_text().splitlines()]
    assert events == ["started", "paused"], "asked to end, it notes how far it was"


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_that_fit_are_unpacked_and_found(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    wheel(kit, "carried_along-1.0-py3-none-any.whl", {"carried_along.py": "ANSWER = 42"})
    wheel(kit, "other-1.0-cp26-cp26-manylinux_2_17_x86_64.whl", {"other.py": ""})
    wheel(kit, "pip-0.1-py3-none-any.whl", {"pip.py": ""})
    stages = [stage("imports", "import carried_along; assert carried_along.ANSWER == 42")]
    assert run(tmp_path, stages, "--kit", str(kit))[0] == 0
    found = json.loads((tmp_path / "kit.json").read_text())
    assert found["carried_along-1.0-py3-none-any.whl"] == "unpacked"
    assert found["other-1.0-cp26-cp26-manylinux_2_17_x86_64.whl"] == "not for this interpreter"
    assert found["pip-0.1-py3-none-any.whl"].endswith("is installed")


def test_tags_are_those_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_site

    monkeypatch.setattr(gpu_site.sys, "version_info", (3, 12))
    monkeypatch.setattr(gpu_site.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(gpu_site.platform, "libc_ver", lambda: ("glibc", "2.28"))
    for name, expected in {
        "a-1-py2.py3-none-any.whl": True,
        "a-1-py312-none-any.whl": True,
        "a-1-py313-none-any.whl": False,
        "a-1-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": True,
        "a-1-cp312-cp312-manylinux_2_34_x86_64.whl": False,
        "a-1-cp311-cp311-manylinux_2_17_x86_64.whl": False,
        "a-1-cp39-abi3-manylinux_2_28_x86_64.whl": True,
        "a-1-cp312-cp312-manylinux_2_17_aarch64.whl": False,
        "a-1-cp312-cp312-win_amd64.whl": False,
    }.items():
        assert gpu_site.fits(name) is expected, name
    assert gpu_site.numbers("4.16.0") > gpu_site.numbers("4.9.1")


def test_the_driver_needs_the_standard_library_alone(tmp_path: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-S", str(DRIVER), "--list"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names[0] == "environment"
    assert names[-1] == "long"
    assert "shared" in names
    assert len(names) >= 12


# -- what its stages need ---------------------------------------------------------------------------------------------


def test_an_item_that_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_stages

    here = gpu_stages.Here("stage", tmp_path, tmp_path, True)
    calls: list[str] = []

    def fails() -> dict[str, Any]:
        calls.append("fails")
        raise ValueError("no memory")

    for _ in range(2):
        here.once("good", lambda: calls.append("good") or {"seconds": 1.0})
        here.once("bad", fails)
    assert calls == ["good", "fails", "fails"], "what failed is tried again"
    assert here.failed == 2 * ["bad: ValueError: no memory"]
    lines = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert [line.get("error") for line in lines] == [None, *2 * ["ValueError: no memory"]]


def test_every_file_with_a_gpu_test_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_stages

    files = gpu_stages.gpu_files()
    assert gpu_stages.POLICY in files
    assert files[-1] == "tests/distributed/test_one_card.py", "the slowest last"
    assert "tests/unit/model/test_attention.py" in files
    assert set(gpu_stages.FILE_SECONDS) <= set(files)


@pytest.mark.slow
def test_without_a_gpu_a_stage_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    own = ["plan", "--out", str(tmp_path), "--kit", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_stages.py"), *own], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "no GPU\n"), done.stderr


# -- what travels -----------------------------------------------------------------------------------------------------


def test_one_library_is_left_of_a_wheel_and_its_record_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kit

    name = "bitsandbytes-1.0-py3-none-any.whl"
    record = "bitsandbytes-1.0.dist-info/RECORD"
    wheel(tmp_path, name, {"bitsandbytes/a.py": "x", f"bitsandbytes/{gpu_kit.LIBRARY}": "so", record: ""})
    with zipfile.ZipFile(tmp_path / name, "a") as archive:
        archive.writestr("bitsandbytes/libbitsandbytes_cuda118.so", "so" * 1000)
    gpu_kit.trim(tmp_path / name)
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert sorted(archive.namelist()) == sorted(["bitsandbytes/a.py", f"bitsandbytes/{gpu_kit.LIBRARY}", record])
        rows = [line.split(",") for line in archive.read(record).decode().splitlines()]
        assert [row[0] for row in rows] == ["bitsandbytes/a.py", f"bitsandbytes/{gpu_kit.LIBRARY}", record]
        assert rows[0][1:] == ["sha256=LXEWQrcmsEQBYnyp-6wy9chTD7GQPMTbAiWHF5IaSIE", "1"]
    assert gpu_kit.check(tmp_path, ["bitsandbytes"]) == ["predictions.json is missing"]
    (tmp_path / "predictions.json").write_text("{}")
    assert gpu_kit.check(tmp_path, ["bitsandbytes"]) == []
    assert gpu_kit.check(tmp_path, ["pydantic"]) == ["pydantic is missing"]
    monkeypatch.setattr(gpu_kit, "MOST_BYTES", 100)
    assert "can travel" in gpu_kit.check(tmp_path, [])[0]


# -- the first run ----------------------------------------------------------------------------------------------------


def test_a_first_run_has_what_was_planned_and_what_it_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_first_run import planned_and_measured

    nothing = planned_and_measured(tmp_path)
    assert (nothing["planned"]["low_bytes"], nothing["measured"]["bytes"], nothing["measured"]["steps"]) == (
        None, None, 0,
    )  # fmt: skip
    plan = {
        "device": {"name": "H200"},
        "estimate": {"low_bytes": 5, "high_bytes": 9, "setting": "NF4"},
        "time": {"parts": {"steps": 4.0}},
    }
    metrics = [
        {"seconds": 1.5, "memory_bytes": 7},
        {"eval_loss": 2.0, "seconds": 100.0},
        {"seconds": 2.0, "memory_bytes": 6},
    ]
    events = [
        {"stage": "train", "event": "memory", "phases": {"load": {"allocated": 3}}},
        {"stage": "train", "event": "finished", "seconds": 30.04},
        {"stage": "merge", "event": "failed", "seconds": 2.0},
    ]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for name, rows in (("metrics", metrics), ("events", events)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = planned_and_measured(tmp_path)
    assert (found["planned"]["low_bytes"], found["planned"]["high_bytes"], found["planned"]["seconds"]) == (5, 9, 4.0)
    assert found["measured"] == {"bytes": 7, "seconds": 3.5, "steps": 2, "phases": {"load": {"allocated": 3}}}
    assert found["seconds_by_stage"] == {"train": 30.0}, "a stage that failed has no time"


# -- the report -------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    own = [sys.executable, "-S", str(DRIVER), "--report", str(folder)]
    return subprocess.run(own, capture_output=True, text=True, check=True).stdout


def test_the_page_has_every_figure_that_can_be_measured(tmp_path: Path) -> None:
    text = (BENCHMARKS.parent / "docs/gpu.md").read_text(encoding="utf-8")
    rows = [line for line in report(tmp_path).splitlines() if line.startswith("| ") and "not yet measured" in line]
    assert len(rows) > 20
    for row in rows:
        figure, goal = row.split(" | ")[:2]
        assert f"{figure} | {goal} |" in text, "copy it from `gpu_day.py --report` of an empty folder"


def test_a_report_puts_figures_beside_their_goals(tmp_path: Path) -> None:
    def put(file: str, *rows: dict[str, Any]) -> None:
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    speed = {"tokens_per_second": 47_500, "peak_bytes": 2**34, "loss": 11.76, "goal": 95_000}
    phases = {name: {"allocated": 100, "reserved": 200} for name in ("load", "first step", "step", "eval")}
    off = {**phases, "step": {"allocated": 101, "reserved": 198}}
    put(
        "items.jsonl",
        {"stage": "lora-1b", "item": "eager", **speed},
        {"stage": "lora-1b", "item": "compile", "error": "no compiler"},
        {
            "stage": "attention",
            "item": "grad_q at 704",
            "non_finite": {"cudnn": 45056, "efficient": 0},
            "numbers": 9999,
        },
        {"stage": "attention", "item": "new shape, cuDNN on", "first_ms": [500, 480, 510], "second_ms": [1, 1.2, 1.1]},
        {"stage": "attention", "item": "decode, cuDNN on", "tokens": 64, "first_seconds": 32, "second_seconds": 2},
        {
            "stage": "first-run",
            "item": "run",
            "setting": "NF4",
            "planned": {"low_bytes": 2**33, "high_bytes": 2**34, "seconds": 9.0},
            "measured": {"bytes": 3 * 2**32, "seconds": 10.0, "steps": 10},
        },
        {"stage": "tests", "item": "tests/a.py", "summary": "3 passed in 1.0s"},
    )
    done = {"status": "skipped", "seconds": 1.0, "reason": "trl | pandas not installed", "again": False}
    put("day.jsonl", {"stage": "trl", **done}, {"stage": "lora-1b", **done, "status": "failed", "again": True})
    put(
        "plan.jsonl",
        {"name": "a", "measured": {"phases": phases, "seconds": 2.0}, "predicted": {"phases": off, "seconds": 1.9}},
        {"name": "b", "failed": ["out of memory"]},
    )
    text = report(tmp_path)
    for row in (
        "| eager | 95,000 tokens/s | 47,500 tokens/s (50% of the goal), 16.0 GiB, first loss 11.7600 |",
        "| compiled, without them | 95,000 tokens/s | failed: no compiler |",
        "| TRL, tuned, on the 1B | – | not yet measured: skipped, trl \\| pandas not installed |",
        "| none but with cuDNN | cudnn 45056, efficient 0 of 9,999 numbers |",
        "500.0 ms, then 1.1 ms (medians of 3 lengths) |",
        "2.0 tokens/s, the second time 32.0 |",
        "| memory in tensors | within 0.3 % | median 1.00%, worst 1.00% (a), of 1; 1 failed |",
        "| time of a step | within 5 % | median 5.00%, worst 5.00% (a), of 1; 1 failed |",
        "| in the plan's range | 12.00 GiB, planned 8.00 to 16.00 GiB (NF4) |",
        "| within 5 % | 10.0 s for 10 steps, planned 9.0 s (-10.0%) |",
        "| `tests/a.py` | passes | 3 passed in 1.0s |",
        "| lora-1b | failed, run again | 1 |",
    ):
        assert row.removeprefix("| eager") in text, row


@pytest.mark.parametrize(("device", "tiny"), [("CPU", True), ("NVIDIA H200", False)])
def test_a_report_of_tiny_models_says_so_first(tmp_path: Path, device: str, tiny: bool) -> None:
    record = {"stage": "environment", "item": "record", "device": device, "python": "3.12.3", "versions": {}}
    (tmp_path / "items.jsonl").write_text(json.dumps(record | {"commit": "", "date": "2026-11-25"}) + "\n")
    text = report(tmp_path)
    assert text.startswith("**A miniature on a CPU" if tiny else "Machine: NVIDIA H200")
