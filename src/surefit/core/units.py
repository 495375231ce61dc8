"""Formatting of quantities and values: memory and disk always in GiB or MiB, durations in words."""

from __future__ import annotations

import re
import shlex

GIB = 1024**3
MIB = 1024**2
KIB = 1024

_SIZE = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?)\s*([kmgt])(i?)(b?)", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Parse a size with its unit into bytes: GB are a thousand MB, as on a disk's box; GiB and G are 1,024 MiB.

    >>> bytes_of("100GB"), bytes_of("1.5 TiB") / GIB, bytes_of("80G") / GIB
    (100000000000, 1536.0, 80.0)

    Raises:
        ValueError: no number, or no unit.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.40} is not a size: write a number and its unit, such as 100GB or 1.5TB")
    number, prefix, binary, unit = match.groups()
    base = 1000.0 if unit and not binary else 1024.0
    factor: float = base ** (1 + "kmgt".index(prefix.lower()))
    return round(float(number.replace("_", "").replace(",", "")) * factor)


def bytes_text(count: float) -> str:
    """Format bytes with a binary unit.

    >>> bytes_text(3 * GIB), bytes_text(1536), bytes_text(12)
    ('3.00 GiB', '1.5 KiB', '12 B')
    """
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / KIB:.1f} KiB" if count >= KIB else f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Format seconds as a readable duration.

    >>> duration_text(4.21), duration_text(125), duration_text(7384)
    ('4.2 s', '2 min 05 s', '2 h 03 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count_text(count: float) -> str:
    """Format a parameter or token count.

    >>> count_text(3_212_749_824), count_text(1_420_000), count_text(950)
    ('3.21B', '1.42M', '950')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "error"), plural(3, "error"), plural(2_000, "row"), plural(2, "process")
    ('1 error', '3 errors', '2,000 rows', '2 processes')
    """
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def truncate_text(text: str, limit: int = 60) -> str:
    """Truncate a value that a message quotes.

    >>> truncate_text("abcdefgh", 5)
    'abcd…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shell_quote(word: object) -> str:
    """Quote a path or another word of a displayed shell command.

    >>> shell_quote("runs/one"), shell_quote("my runs; rm -rf ~")
    ('runs/one', "'my runs; rm -rf ~'")
    """
    return shlex.quote(str(word))


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor, color text, change the writing direction or is no character at all.
    File names and rows are other people's, and may contain any of these.

    >>> printable("runs/\\x1b[2Jone\\rtwo")
    'runs/\\\\x1b[2Jone\\\\rtwo'
    """
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


_DIRECTORIES = re.compile(r"(?<![\w:/.~<-])(?:~|\.{1,2})?/(?:[\w.@+-]+/)*(?=[\w.@+-])")


def without_paths(text: str) -> str:
    """Shorten every path with directories in a text that may leave this machine to its last name.

    >>> without_paths("trained from /home/me/models/base, see ../data/x.jsonl and https://a.org/b/c, Qwen/Qwen3-4B</p>")
    'trained from base, see x.jsonl and https://a.org/b/c, Qwen/Qwen3-4B</p>'
    """
    return _DIRECTORIES.sub("", text)
