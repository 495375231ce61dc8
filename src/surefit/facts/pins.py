"""Versions as requirements write them: whether two of them can be met by one release."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

FAR = 99_999
"""A release number that nothing has."""


def compatible(one: str, other: str) -> bool:
    """Whether a release can fulfil both; true where one of them cannot be read.

    >>> compatible("<2.3", ">=2.2"), compatible("==2.1.2", ">=2.3"), compatible("<5,>=3.20", ">=6")
    (True, False, False)
    """
    try:
        both = SpecifierSet(f"{one},{other}" if one and other else one or other)
        return any(both.contains(version, prereleases=True) for version in _candidates(both))
    except (InvalidSpecifier, InvalidVersion):
        return True


def exact(text: str) -> str | None:
    """The one version that a specifier admits: 2.1.4 of ==2.1.4."""
    try:
        parts = list(SpecifierSet(text))
    except InvalidSpecifier:
        return None
    pinned = [part.version for part in parts if part.operator in ("==", "===") and not part.version.endswith(".*")]
    return pinned[0] if len(pinned) == 1 and len(parts) == 1 else None


def _candidates(both: SpecifierSet) -> Iterator[Version]:
    """Versions at, just above and just below each that is named: where there is room, one of them lies in it."""
    yield from (Version("0"), Version(f"{FAR}"))
    for part in both:
        yield from _around(part)


def _around(part: Specifier) -> Iterator[Version]:
    version = Version(part.version.removesuffix(".*"))
    release = list(version.release)
    yield version
    yield Version(".".join(map(str, [*release, FAR])))
    while release and release[-1] == 0:
        release.pop()
    if release:
        yield Version(".".join(map(str, [*release[:-1], release[-1] - 1, FAR])))
