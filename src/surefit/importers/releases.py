"""Which release of transformers, TRL and PEFT takes which argument, and which of them a project is judged by.

The table, schemas/releases.json, was read from the packages' sources by scripts/releases.py. A project is judged by the
newest release that its requirements admit, and without requirements by the newest one in the table.
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
    """The file, with the keys of each span of releases as lists."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def minor_releases(package: str) -> list[str]:
    """The minor releases in the table, oldest first."""
    found: list[str] = release_table()["releases"].get(package, [])
    return found


@lru_cache(maxsize=256)
def argument_spans(name: str, what: str) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Argument of a class → the runs of releases, by index, that take it (`takes`) or warn about it (`deprecated`)."""
    entry = release_table()["classes"].get(name, {})
    return _spans(entry.get(what, {}), entry.get("package", ""))


@lru_cache(maxsize=2)
def trl_exports() -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Name → the releases of TRL that have it at their top."""
    return _spans(release_table()["names"], "trl")


def _spans(written: Mapping[str, str], package: str) -> dict[str, tuple[tuple[int, int], ...]]:
    order = {release: i for i, release in enumerate(minor_releases(package))} | {
        "now": len(minor_releases(package)) - 1
    }
    found = {}
    for span, keys in written.items():
        runs = tuple((order[a], order[b]) for a, b in (part.split(" to ") for part in span.split(", ")))
        found.update(dict.fromkeys(keys.split(), runs))
    return found


@lru_cache(maxsize=1)
def _requirements_table() -> Mapping[str, Any]:
    """schemas/requirements.json, which scripts/package_requirements.py writes from the packages' metadata."""
    found: dict[str, Any] = json.loads((TABLE.parent / "requirements.json").read_text(encoding="utf-8"))
    return found


def requirements_of(package: str, version: str) -> tuple[str, ...]:
    """What a release asks of others ("transformers>=4.46.0"); empty where it is not in the tables."""
    minor = ".".join(version.split(".")[:2])
    known = _exact_requirements(package, version)
    named = {_package(text) for text in known}
    general = release_table()["requires"].get(package, {}).get(minor, "").split()
    return (*known, *(text for text in general if _package(text) not in named))


def _exact_requirements(package: str, version: str) -> tuple[str, ...]:
    """What a release asks for; one between two in the table asks for what both of them do."""
    releases = _requirements_table()["requires"].get(package, {})
    if version in releases:
        return tuple(releases[version].split())
    try:
        wanted = Version(version)
        older = [text for known, text in releases.items() if Version(known) < wanted][-1:]
        newer = [text for known, text in releases.items() if Version(known) > wanted][:1]
    except InvalidVersion:
        return ()
    return tuple(text for text in older[0].split() if text in newer[0].split()) if older and newer else ()


def _package(text: str) -> str:
    return re.split(r"[<>=!~\[]", text)[0].replace("_", "-")


def minimum_python(package: str, versions: str) -> str | None:
    """The Python that every release needs which these versions admit; None where that is not known.

    >>> minimum_python("trl", "==0.19.1"), minimum_python("trl", ">=0.9"), minimum_python("a-package", "")
    ('3.9', None, None)
    """
    known = _requirements_table()["python"].get(package, {}) if versions else {}
    needed = [python for release, python in known.items() if not compatible(versions, f"<{release}")]
    return needed[-1] if needed else None


@dataclass(frozen=True)
class TargetReleases:
    """Which releases count for a project.

    Attributes:
        asked: package → the versions that its requirements admit.
        source: package → the file that says so.
        unsloth: Unsloth is imported, which replaces TRL's configs and trainers by its own.
    """

    asked: Mapping[str, str]
    source: Mapping[str, str]
    unsloth: bool = False

    @cached_property
    def bounds(self) -> Mapping[str, str]:
        """Package → versions, with what Unsloth asks for where the project leaves that open."""
        found = {package: versions for package, versions in self.asked.items() if versions}
        if not self.unsloth:
            return found
        release = self._newest("unsloth", found) or ""
        for text in requirements_of("unsloth", release):
            package = next((name for name in NAMES if text.startswith(name)), None)
            if package and package not in found:
                found[package] = text[len(package) :]
        return found

    def _newest(self, package: str, bounds: Mapping[str, str]) -> str | None:
        """The newest release that the bounds admit; None where they admit none of the table's."""
        asked = bounds.get(package, "")
        order = reversed(minor_releases(package))
        return next((release for release in order if not asked or compatible(f"=={release}.*", asked)), None)

    @cached_property
    def _counting(self) -> Mapping[str, str | None]:
        return {package: self._newest(package, self.bounds) for package in NAMES}

    def release(self, package: str) -> str | None:
        """The release that counts; None where the requirements admit none that is known."""
        return self._counting[package]

    def is_open(self, package: str) -> bool:
        """Whether the package is not pinned beside another that is held to an older release: its own is not known."""
        if package in self.bounds:
            return False
        others = [name for name in ("transformers", "trl", "peft") if name != package]
        return any(name in self.bounds and self.release(name) != minor_releases(name)[-1] for name in others)

    def takes(self, name: str, key: str) -> Verdict:
        """Whether a class takes an argument, in the release that counts."""
        package = release_table()["classes"][name]["package"]
        runs = argument_spans(name, "takes").get(key)
        if not runs:
            return "unknown"
        return self._verdict(package, runs, argument_spans(name, "deprecated").get(key, ()))

    def has(self, name: str) -> Verdict:
        """Whether there is such a class, in the release that counts."""
        entry = release_table()["classes"][name]
        return self._verdict(entry["package"], _spans({entry["there"]: name}, entry["package"])[name], ())

    def came_with(self, name: str) -> str:
        """The first release with a class: "TRL 0.14"."""
        entry = release_table()["classes"][name]
        return f"{NAMES[entry['package']]} {entry['there'].partition(' ')[0]}"

    def exports(self, name: str) -> Verdict:
        """Whether `from trl import` finds a name, in the release that counts."""
        runs = trl_exports().get(name)
        return self._verdict("trl", runs, ()) if runs else "unknown"

    def _verdict(self, package: str, runs: tuple[tuple[int, int], ...], warned: tuple[tuple[int, int], ...]) -> Verdict:
        order = minor_releases(package)
        release, last = self.release(package), len(order) - 1
        kept = runs[-1][1] == last
        if release is None or self.is_open(package):
            return "taken" if kept or release is None else "deprecated"
        at = order.index(release)
        if any(first <= at <= end for first, end in runs):
            # What the newest release still takes can wait.
            return "deprecated" if not kept and any(first <= at <= end for first, end in warned) else "taken"
        return "gone" if runs[0][1] < at else "not yet"

    def since(self, name: str, key: str) -> str:
        """ "transformers 4.51", the release that no longer takes an argument; or the first one that does."""
        package = release_table()["classes"][name]["package"]
        runs, order = argument_spans(name, "takes")[key], minor_releases(package)
        first = order[runs[0][0]] if self.takes(name, key) == "not yet" else order[min(runs[-1][1] + 1, len(order) - 1)]
        return f"{NAMES[package]} {first}"

    def keys(self, name: str, *verdicts: Verdict) -> Iterator[str]:
        """The arguments of a class for which this holds."""
        return (key for key in argument_spans(name, "takes") if self.takes(name, key) in verdicts)

    def reaches(self, package: str, versions: str) -> bool:
        """Whether the release that counts is one of these versions."""
        if package not in release_table()["releases"]:
            return not self.bounds.get(package) or compatible(self.bounds[package], versions)
        release = self.release(package)
        return release is not None and not self.is_open(package) and compatible(f"=={release}.*", versions)

    def said(self) -> str:
        """The releases, with the file that asks for them, as a note says it."""
        parts = []
        for package in ("transformers", "trl", "peft"):
            release = self.release(package)
            why = self.source.get(package) or (
                "Unsloth" if package in self.bounds and package not in self.asked else None
            )
            if self.is_open(package):
                parts.append(f"{NAMES[package]} (not pinned beside older releases: any)")
            elif release is None:
                parts.append(
                    f"{NAMES[package]}{self.bounds.get(package, '')} ({why}): older than the table of releases"
                )
            else:
                parts.append(f"{NAMES[package]} {release}" + (f" ({why})" if why else ""))
        return ", ".join(parts)


NEWEST = TargetReleases({}, {})
"""No requirements: the newest releases in the table."""
