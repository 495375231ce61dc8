"""The sample sets that ship with the package; README.md beside this file says what each is."""

from pathlib import Path

PREFIX = "surefit/"


def resolve(name: str) -> Path | None:
    """The packaged file for a name such as "surefit/function-calling-train", or None where there is none.

    >>> resolve("surefit/function-calling-eval").name
    'function-calling-eval.jsonl'
    >>> resolve("surefit/../secrets") is None
    True
    """
    return available().get(name)


def available() -> dict[str, Path]:
    """Every sample set by its name."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".jsonl", ".txt"))
    return {PREFIX + path.stem: path for path in files}
