"""Version specifiers in requirements: whether one release can satisfy two of them."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

FAR = 99_999
"""A release number above any that exists."""


def compatible(one: str, other: str) -> bool:
    """Return whether a release can satisfy both specifiers; true where one of them cannot be parsed.

    >>> compatible("<2.3", ">=2.2"), compatible("==2.1.2", ">=2.3"), compatible("<5,>=3.20", ">=6")
    (True, False, False)
    """
    try:
        combined = SpecifierSet(f"{one},{other}" if one and other else one or other)
        return any(combined.contains(version, prereleases=True) for version in _candidates(combined))
    except (InvalidSpecifier, InvalidVersion):
        return True


def exact(text: str) -> str | None:
    """Return the one version that a specifier admits: 2.1.4 of ==2.1.4."""
    try:
        parts = list(SpecifierSet(text))
    except InvalidSpecifier:
        return None
    pinned = [part.version for part in parts if part.operator in ("==", "===") and not part.version.endswith(".*")]
    return pinned[0] if len(pinned) == 1 and len(parts) == 1 else None


def _candidates(both: SpecifierSet) -> Iterator[Version]:
    """Yield versions at, just above and just below each version in the specifier: if any release satisfies it, one of
    these does."""
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
