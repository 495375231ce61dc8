"""The sample data sets in the package; README.md beside this file describes each."""

from pathlib import Path

PREFIX = "surefit/"


def find_sample(name: str) -> Path | None:
    """Return the packaged file for a name such as "surefit/function-calling-train", or None.

    >>> find_sample("surefit/function-calling-eval").name
    'function-calling-eval.jsonl'
    >>> find_sample("surefit/../secrets") is None
    True
    """
    return list_samples().get(name)


def sample_name(file: str) -> str | None:
    """Return the name of a packaged file, or None for any other.

    >>> sample_name(str(find_sample("surefit/function-calling-eval"))), sample_name("rows.jsonl")
    ('surefit/function-calling-eval', None)
    """
    path = Path(file)
    return PREFIX + path.stem if path.parent == Path(__file__).parent else None


def list_samples() -> dict[str, Path]:
    """Return every sample set by its name."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".jsonl", ".txt"))
    return {PREFIX + path.stem: path for path in files}
