"""Wheels without pip: unpacked into a folder for PYTHONPATH, those that this interpreter lacks and can import."""

from __future__ import annotations

import platform
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path


def unpack(kit: Path, site: Path) -> dict[str, str]:
    """What became of each wheel of a folder, by its name. Called again, it only does what is left."""
    found = {}
    site.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(kit.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        stamp = site / f".{wheel.name}.unpacked"
        there = installed(name)
        if stamp.exists():
            found[wheel.name] = "unpacked"
        elif not fits(wheel.name):
            found[wheel.name] = "not for this interpreter"
        elif there is not None and numbers(there) >= numbers(version):
            found[wheel.name] = f"{there} is installed"
        else:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            stamp.touch()
            found[wheel.name] = "unpacked"
    return found


def installed(name: str) -> str | None:
    """The version that this interpreter has without the folder."""
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Of a release, to be compared.

    >>> numbers("2.14.3") < numbers("2.15.0rc1")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def fits(name: str) -> bool:
    """Whether a wheel's tags (PEP 425) are of this interpreter on this machine."""
    pythons, abis, platforms = name.removesuffix(".whl").split("-")[-3:]
    major, minor = sys.version_info[:2]
    own, abi3 = f"cp{major}{minor}", {f"cp{major}{older}" for older in range(2, minor + 1)}
    if not set(abis.split(".")) & {"none", own, "abi3"}:
        return False
    allowed = {"py3", f"py{major}{minor}", own} | (abi3 if "abi3" in abis.split(".") else set())
    return bool(set(pythons.split(".")) & allowed) and any(_runs_here(tag) for tag in platforms.split("."))


def _runs_here(tag: str) -> bool:
    if tag == "any":
        return True
    found = re.fullmatch(r"(manylinux_(\d+)_(\d+)|manylinux2014|manylinux2010|manylinux1|linux)_(\w+)", tag)
    if not found or sys.platform != "linux" or found[4] != platform.machine():
        return False
    library, version = platform.libc_ver()
    if library != "glibc":
        return False
    return not found[2] or (int(found[2]), int(found[3])) <= numbers(version)[:2]
