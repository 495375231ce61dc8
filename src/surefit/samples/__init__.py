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


def name_of(file: str) -> str | None:
    """The name of a packaged file, or None for any other.

    >>> name_of(str(resolve("surefit/function-calling-eval"))), name_of("rows.jsonl")
    ('surefit/function-calling-eval', None)
    """
    path = Path(file)
    return PREFIX + path.stem if path.parent == Path(__file__).parent else None


def available() -> dict[str, Path]:
    """Every sample set by its name."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".jsonl", ".txt"))
    return {PREFIX + path.stem: path for path in files}
