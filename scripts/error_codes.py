"""Gives every error its code: fills in `code="E?"`, and reports what has none or stands twice.

python scripts/error_codes.py [--start 400]     (tests/arch calls `problems`)
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from surefit.core import errors

SOURCE = Path(errors.__file__).parents[1]
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
ROOMS = {
    "1": "core cli api results ui samples doctor report", "2": "config facts lint", "3": "importers", "4": "data",
    "5": "model train checkpoint parallel launch telemetry", "6": "merge",
    "7": "evaluate generate metrics recipes retrieval task", "8": "plan stages",
}  # fmt: skip
"""The first digit of a code → the folders that it stood for when it was given out; a code stays when code moves."""
CODE = re.compile(r"E[1-8]\d{3}")


def errors_made(path: Path) -> Iterator[tuple[int, str | None]]:
    """Each place in one file that makes an error: its line, and the code (None: there is none)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in ERRORS:
            given = next((keyword.value for keyword in node.keywords if keyword.arg == "code"), None)
            yield node.lineno, ast.unparse(given).strip("'") if given else None


def problems() -> list[str]:
    """What is wrong with the codes, one line each: missing, malformed, or given out twice."""
    made = [(path, line, code) for path in sorted(SOURCE.rglob("*.py")) for line, code in errors_made(path)]
    literal = Counter(code for _, _, code in made if code and CODE.fullmatch(code))
    lines = [
        f"{path.relative_to(SOURCE)}:{line}: {code or 'no code'}"
        for path, line, code in made
        if code is None or not (CODE.fullmatch(code) or code.endswith(".code")) or literal[code] > 1
    ]
    return lines


def fill(start: int) -> int:
    """Write the next free code of its room over every `code="E?"`; how many there were."""
    used = set(CODE.findall("\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))))
    filled = 0
    for path in sorted(SOURCE.rglob("*.py")):
        folder = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        while '"E?"' in text:
            digit = next(digit for digit, folders in ROOMS.items() if folder in folders.split())
            code = next(f"E{digit}{n:03}" for n in range(start, 1000) if f"E{digit}{n:03}" not in used)
            used.add(code)
            text = text.replace('"E?"', f'"{code}"', 1)
            path.write_text(text, encoding="utf-8")
            filled += 1
    return filled


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=1)
    print(f"{fill(parser.parse_args().start)} codes filled in")
    print("\n".join(problems()) or "every error has a code of its own")
