"""The folder that benchmarks/gpu_day.py takes along: wheels for a machine without a network, and the predictions.

    python benchmarks/gpu_kit.py [--kit DIR] [--python 3.12] [--gpu h200] [--check]

Downloads what torch, transformers and PEFT do not bring, in the versions of constraints.txt, for CPython on Linux
x86-64; keeps one library of bitsandbytes, that of CUDA 13.0; lets plan_accuracy.py predict. Then it checks that every
wheel opens and that all is under 45 MB. `--check` does that alone. `make gpu-kit` runs it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
KIT = HERE / "gpu-kit"
PREDICTIONS = "predictions.json"
MOST_BYTES = 45_000_000
WHEELS = (
    "annotated-types", "bitsandbytes", "datasets", "dill", "hypothesis", "iniconfig", "liger-kernel", "multiprocess",
    "pandas", "penman", "pluggy", "pydantic", "pydantic-core", "pytest", "python-dateutil",
    "sortedcontainers", "trl", "typing-extensions", "typing-inspection", "xxhash",
)  # fmt: skip
"""Beside torch, transformers, PEFT, accelerate and PyArrow, which alone is over the limit."""
LIBRARY = "libbitsandbytes_cuda130.so"
GLIBC = ("_2_34", "_2_28", "_2_27", "_2_24", "_2_17", "2014")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, default=KIT)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--gpu", default="h200", help="of the catalogue; what the predictions are for")
    parser.add_argument("--check", action="store_true", help="look at what is there and fetch nothing")
    asked = parser.parse_args()
    if not asked.check:
        fetch(asked.kit, asked.python)
        command = [sys.executable, HERE / "plan_accuracy.py", "--twelve", "--predict", asked.kit / PREDICTIONS]
        subprocess.run([*command, "--gpu", asked.gpu], check=True)
    problems = check(asked.kit)
    print("\n".join(problems) or f"{asked.kit}: {size_of(asked.kit) / 1e6:.1f} MB, {len(wheels(asked.kit))} wheels")
    return 1 if problems else 0


def fetch(kit: Path, python: str) -> None:
    """Fill the folder; what was in it before is replaced once everything has come."""
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        target = Path(folder)
        platforms = [f"--platform=manylinux{version}_x86_64" for version in GLIBC]
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms,
                f"--constraint={ROOT / 'constraints.txt'}", f"--dest={target}", *WHEELS,
            ],
            check=True,
        )  # fmt: skip
        for wheel in target.glob("bitsandbytes-*.whl"):
            trim(wheel)
        kit.mkdir(parents=True, exist_ok=True)
        for old in wheels(kit):
            old.unlink()
        for wheel in target.glob("*.whl"):
            shutil.copy2(wheel, kit / wheel.name)


def trim(wheel: Path, keep: str = LIBRARY) -> None:
    """Leave one compiled library in a wheel, and say so in its RECORD, so that pip takes it too."""
    smaller = wheel.with_suffix(".trimmed")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        if not any(name.endswith(f"/{keep}") for name in old.namelist()):
            raise SystemExit(f"{wheel.name} has no {keep}: which library does this version bring for the GPU machine?")
        records = [name for name in old.namelist() if name.endswith(".dist-info/RECORD")]
        kept = [
            name
            for name in old.namelist()
            if name not in records and (not name.endswith(".so") or name.endswith(f"/{keep}"))
        ]
        lines = []
        for name in kept:
            content = old.read(name)
            new.writestr(old.getinfo(name), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
        for name in records:
            new.writestr(name, "\n".join([*lines, f"{name},,"]) + "\n")
    smaller.replace(wheel)


def wheels(kit: Path) -> list[Path]:
    return sorted(kit.glob("*.whl"))


def size_of(kit: Path) -> int:
    """Bytes of everything in it."""
    return sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())


def check(kit: Path, wanted: Iterable[str] = (*WHEELS,)) -> list[str]:
    """What is wrong with a kit, in words; nothing where it can travel."""
    problems = []
    there: set[str] = set()
    for wheel in wheels(kit):
        there.add(wheel.name.partition("-")[0].lower().replace("_", "-"))
        with zipfile.ZipFile(wheel) as archive:
            broken = archive.testzip()
        if broken is not None:
            problems.append(f"{wheel.name}: {broken} is damaged")
    problems += [f"{name} is missing" for name in wanted if name not in there]
    if not (kit / PREDICTIONS).is_file():
        problems.append(f"{PREDICTIONS} is missing")
    if size_of(kit) > MOST_BYTES:
        problems.append(f"{size_of(kit) / 1e6:.1f} MB, and {MOST_BYTES / 1e6:.0f} MB can travel")
    return problems


if __name__ == "__main__":
    sys.exit(main())
