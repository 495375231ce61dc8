"""Arguments that each release of transformers, TRL and PEFT accepts, and the releases that a project is checked
against.

The table, schemas/releases.json, was read from the packages' sources by scripts/releases.py. A project is checked
against the newest releases that its requirements allow, and without requirements against the newest in the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from surefit.facts.pins import compatible

TABLE = Path(__file__).parent / "schemas/releases.json"
NAMES = {"transformers": "transformers", "trl": "TRL", "peft": "PEFT", "unsloth": "Unsloth"}
Verdict = Literal["taken", "deprecated", "gone", "not yet", "unknown"]


@lru_cache(maxsize=1)
def release_table() -> Mapping[str, Any]:
    """Return the table of releases, with the keys of each span of releases as one string."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def minor_releases(package: str) -> list[str]:
    """Return the minor releases of a package in the table, oldest first."""
    releases: list[str] = release_table()["releases"].get(package, [])
    return releases


@lru_cache(maxsize=256)
def argument_spans(name: str, what: str) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Return argument of a class → the ranges of releases, by index, that accept it (`takes`) or warn about it
    (`deprecated`)."""
    entry = release_table()["classes"].get(name, {})
    return _spans(entry.get(what, {}), entry.get("package", ""))


@lru_cache(maxsize=2)
def trl_exports() -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Return name → the ranges of TRL releases that export it at top level."""
    return _spans(release_table()["names"], "trl")


def _spans(written: Mapping[str, str], package: str) -> dict[str, tuple[tuple[int, int], ...]]:
    order = {release: i for i, release in enumerate(minor_releases(package))} | {
        "now": len(minor_releases(package)) - 1
    }
    spans = {}
    for span, keys in written.items():
        runs = tuple((order[a], order[b]) for a, b in (part.split(" to ") for part in span.split(", ")))
        spans.update(dict.fromkeys(keys.split(), runs))
    return spans


@lru_cache(maxsize=1)
def _requirements_table() -> Mapping[str, Any]:
    """Return schemas/requirements.json, which scripts/package_requirements.py writes from the packages' metadata."""
    table: dict[str, Any] = json.loads((TABLE.parent / "requirements.json").read_text(encoding="utf-8"))
    return table


def requirements_of(package: str, version: str) -> tuple[str, ...]:
    """Return what a release requires of other packages ("transformers>=4.46.0"); empty if it is not in the tables."""
    minor = ".".join(version.split(".")[:2])
    exact = _exact_requirements(package, version)
    packages = {_package(text) for text in exact}
    general = release_table()["requires"].get(package, {}).get(minor, "").split()
    return (*exact, *(text for text in general if _package(text) not in packages))


def _exact_requirements(package: str, version: str) -> tuple[str, ...]:
    """Return what a release requires; for a release between two in the table, what both of them require."""
    releases = _requirements_table()["requires"].get(package, {})
    if version in releases:
        return tuple(releases[version].split())
    try:
        target = Version(version)
        older = [text for release, text in releases.items() if Version(release) < target][-1:]
        newer = [text for release, text in releases.items() if Version(release) > target][:1]
    except InvalidVersion:
        return ()
    return tuple(text for text in older[0].split() if text in newer[0].split()) if older and newer else ()


def _package(text: str) -> str:
    return re.split(r"[<>=!~\[]", text)[0].replace("_", "-")


def minimum_python(package: str, versions: str) -> str | None:
    """Return the Python version that every release allowed by `versions` requires; None if it is not known.

    >>> minimum_python("trl", "==0.19.1"), minimum_python("trl", ">=0.9"), minimum_python("a-package", "")
    ('3.9', None, None)
    """
    python_versions = _requirements_table()["python"].get(package, {}) if versions else {}
    required = [python for release, python in python_versions.items() if not compatible(versions, f"<{release}")]
    return required[-1] if required else None


@dataclass(frozen=True)
class TargetReleases:
    """The library releases that a project is checked against.

    Attributes:
        required: package → the versions that the project's requirements allow.
        source: package → the name of the file with the requirement.
        unsloth: whether Unsloth is imported, which replaces TRL's configs and trainers with its own.
    """

    required: Mapping[str, str]
    source: Mapping[str, str]
    unsloth: bool = False

    @cached_property
    def bounds(self) -> Mapping[str, str]:
        """Return package → versions, completed by Unsloth's requirements for packages that the project does not pin."""
        pinned = {package: versions for package, versions in self.required.items() if versions}
        if not self.unsloth:
            return pinned
        release = self._newest("unsloth", pinned) or ""
        for text in requirements_of("unsloth", release):
            package = next((name for name in NAMES if text.startswith(name)), None)
            if package and package not in pinned:
                pinned[package] = text[len(package) :]
        return pinned

    def _newest(self, package: str, bounds: Mapping[str, str]) -> str | None:
        """Return the newest release in the table that the bounds allow, or None."""
        specifier = bounds.get(package, "")
        order = reversed(minor_releases(package))
        return next((release for release in order if not specifier or compatible(f"=={release}.*", specifier)), None)

    @cached_property
    def _counting(self) -> Mapping[str, str | None]:
        return {package: self._newest(package, self.bounds) for package in NAMES}

    def release(self, package: str) -> str | None:
        """Return the checked release of a package; None if the requirements allow none in the table."""
        return self._counting[package]

    def is_open(self, package: str) -> bool:
        """Return whether a package is unpinned while another is held to an older release, so that its release is
        unknown."""
        if package in self.bounds:
            return False
        other_packages = [name for name in ("transformers", "trl", "peft") if name != package]
        return any(name in self.bounds and self.release(name) != minor_releases(name)[-1] for name in other_packages)

    def takes(self, name: str, key: str) -> Verdict:
        """Return the status of a class's argument in the checked release."""
        package = release_table()["classes"][name]["package"]
        runs = argument_spans(name, "takes").get(key)
        if not runs:
            return "unknown"
        return self._verdict(package, runs, argument_spans(name, "deprecated").get(key, ()))

    def has(self, name: str) -> Verdict:
        """Return the status of a class in the checked release."""
        entry = release_table()["classes"][name]
        return self._verdict(entry["package"], _spans({entry["there"]: name}, entry["package"])[name], ())

    def came_with(self, name: str) -> str:
        """Return the first release that has a class, such as "TRL 0.14"."""
        entry = release_table()["classes"][name]
        return f"{NAMES[entry['package']]} {entry['there'].partition(' ')[0]}"

    def exports(self, name: str) -> Verdict:
        """Return the status of a name imported from `trl` in the checked release."""
        runs = trl_exports().get(name)
        return self._verdict("trl", runs, ()) if runs else "unknown"

    def _verdict(self, package: str, runs: tuple[tuple[int, int], ...], warned: tuple[tuple[int, int], ...]) -> Verdict:
        order = minor_releases(package)
        release, last = self.release(package), len(order) - 1
        in_newest = runs[-1][1] == last
        if release is None or self.is_open(package):
            return "taken" if in_newest or release is None else "deprecated"
        index = order.index(release)
        if any(first <= index <= end for first, end in runs):
            # A warning is not reported while the newest release still accepts the argument.
            return "deprecated" if not in_newest and any(first <= index <= end for first, end in warned) else "taken"
        return "gone" if runs[0][1] < index else "not yet"

    def since(self, name: str, key: str) -> str:
        """Return the release that removed an argument, such as "transformers 4.51", or the one that introduced it."""
        package = release_table()["classes"][name]["package"]
        runs, order = argument_spans(name, "takes")[key], minor_releases(package)
        first = order[runs[0][0]] if self.takes(name, key) == "not yet" else order[min(runs[-1][1] + 1, len(order) - 1)]
        return f"{NAMES[package]} {first}"

    def keys(self, name: str, *verdicts: Verdict) -> Iterator[str]:
        """Return the arguments of a class with one of these statuses."""
        return (key for key in argument_spans(name, "takes") if self.takes(name, key) in verdicts)

    def reaches(self, package: str, versions: str) -> bool:
        """Return whether the checked release is one of these versions."""
        if package not in release_table()["releases"]:
            return not self.bounds.get(package) or compatible(self.bounds[package], versions)
        release = self.release(package)
        return release is not None and not self.is_open(package) and compatible(f"=={release}.*", versions)

    def said(self) -> str:
        """Return the checked releases, with the file that requires them, as text for a note."""
        parts = []
        for package in ("transformers", "trl", "peft"):
            release = self.release(package)
            origin = self.source.get(package) or (
                "Unsloth" if package in self.bounds and package not in self.required else None
            )
            if self.is_open(package):
                parts.append(f"{NAMES[package]} (not pinned, next to older releases: any)")
            elif release is None:
                parts.append(
                    f"{NAMES[package]}{self.bounds.get(package, '')} ({origin}): older than the table of releases"
                )
            else:
                parts.append(f"{NAMES[package]} {release}" + (f" ({origin})" if origin else ""))
        return ", ".join(parts)


NEWEST = TargetReleases({}, {})
"""The newest releases in the table, for a project without requirements."""
