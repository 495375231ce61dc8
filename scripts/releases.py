"""Write src/surefit/importers/schemas/releases.json: which release of which library takes which argument.

python scripts/releases.py WHEELS

WHEELS is a folder with wheels of transformers, TRL, PEFT and Unsloth, several releases of each (`pip download --no-deps
trl==0.12.2`); of one minor release the last file by version counts. Only their sources are parsed; nothing is imported.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

OUTPUT = Path(__file__).parent.parent / "src/surefit/importers/schemas/releases.json"
FILES = {
    "transformers": r"transformers/((training_args|trainer)(_seq2seq)?|utils/quantization_config)\.py",
    "trl": r"trl/(trainer|experimental/\w+)/(?!judges|callbacks|utils)\w+\.py",
    "peft": r"peft/tuners/lora/config\.py",
}
KEPT = {"transformers": r"(Seq2Seq)?(TrainingArguments|Trainer)|BitsAndBytesConfig", "trl": r"_?\w+(Config|Trainer)"}
KEPT["peft"] = "LoraConfig"
NEEDED = ("transformers", "trl", "peft", "accelerate", "torch", "tokenizers", "huggingface-hub", "datasets", "numpy")
HELP = re.compile(r"(argument|parameter|option|`\w+`) (is|has been) deprecated|^deprecated", re.IGNORECASE)
WARNINGS = (
    re.compile(r"(?<!for )`(?:--)?(\w+)`(?: argument| parameter)? (?:is|are|has been) deprecated"),
    re.compile(r"deprecated `--(\w+)` argument"),
)
UNSAID = {"trl": {"0.12": "transformers>=4.46"}}
"""What a release needs and its metadata leaves out: SFTTrainer 0.12 hands Trainer `processing_class`."""
LONG = 1000
"""Characters of a docstring, which is no warning."""


def main(wheels: Path) -> int:
    """Read every wheel and write the table."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(wheels.glob("*.whl"), key=lambda path: Version(path.name.split("-")[1])):
        package, version = path.name.split("-")[:2]
        parts = Version(version).release
        found.setdefault(package, {})[f"{parts[0]}.{parts[1]}"] = release(path, package)
    table: dict[str, Any] = {
        "releases": {package: list(releases) for package, releases in found.items()},
        "requires": {package: requires(package, releases) for package, releases in found.items()},
        "classes": {
            name: members for package in FILES for name, members in classes(package, found.get(package, {})).items()
        },
        "names": spans_of({v: one["names"] for v, one in found["trl"].items()}, list(found["trl"])),
    }
    OUTPUT.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size:,} bytes, {len(table['classes'])} classes")
    return 0


def release(path: Path, package: str) -> dict[str, Any]:
    """What one wheel's classes take, what it exports, and what it asks for."""
    taken: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if package in FILES and re.fullmatch(FILES[package], name):
                for each, own in members(wheel.read(name).decode(), package).items():
                    # TRL keeps a class that hands everything on where one has moved to trl.experimental.
                    other = taken.get(each, own)
                    taken[each] = {**own, **{key: own[key] | other[key] for key in ("takes", "deprecated")}}
                    taken[each]["bases"] = [*own["bases"], *other["bases"]]
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        asked = re.findall(r"^Requires-Dist: (.*)$", wheel.read(metadata).decode(), re.MULTILINE)
        if package == "trl":
            names = exported(wheel.read("trl/__init__.py").decode())
    return {"classes": taken, "names": names, "requires": asked}


def members(text: str, package: str) -> dict[str, dict[str, Any]]:
    """Class → its own arguments, those it warns about, and its bases."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and re.fullmatch(KEPT[package], node.name):
            init = next((x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"), None)
            takes = set(parameters(init) if init else fields(node))
            found[node.name] = {
                "takes": takes,
                "deprecated": set(warned(node)) & takes | set(renamed(init)),
                "bases": [base.id for base in node.bases if isinstance(base, ast.Name)],
                "any": init is not None and init.args.kwarg is not None,
            }
    return found


def fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields that `__init__` takes."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            written = ast.unparse(each)
            if "init=False" not in written and "ClassVar" not in written:
                yield each.target.id


def parameters(init: ast.FunctionDef) -> Iterator[str]:
    """The parameters of `__init__`."""
    yield from (each.arg for each in (*init.args.args, *init.args.kwonlyargs) if each.arg != "self")


def renamed(init: ast.FunctionDef | None) -> Iterator[str]:
    """Old names that a decorator still takes, and parameters that one warns about."""
    for each in init.decorator_list if init else ():
        if isinstance(each, ast.Call) and "deprecate" in ast.unparse(each.func):
            yield from (str(arg.value) for arg in each.args[:1] if isinstance(arg, ast.Constant))
            listed = next((k.value for k in each.keywords if k.arg == "deprecated_args"), None)
            yield from (item.value for item in getattr(listed, "elts", ()))


def warned(node: ast.ClassDef) -> Iterator[str]:
    """Arguments whose help or whose warning says that they are deprecated."""
    for each in node.body:
        if not (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None):
            continue
        if HELP.search(" ".join(texts(each.value))):
            yield each.target.id
    for text in texts(node):
        if len(text) < LONG:
            yield from (name for pattern in WARNINGS for name in pattern.findall(text))


def texts(node: ast.AST) -> Iterator[str]:
    """The strings in a part of the source."""
    yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str))


def exported(text: str) -> set[str]:
    """The names that `from trl import …` finds."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple):
            found |= {x.value for x in node.elts if isinstance(x, ast.Constant) and isinstance(x.value, str)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.fullmatch(r"[A-Za-z]\w+", name)}


def classes(package: str, releases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Class → its package, its arguments by the releases that take them, and those that are deprecated."""
    names = sorted({name for one in releases.values() for name in one["classes"] if not name.startswith("_")})
    found = {}
    for name in names:
        having = {v: one["classes"] for v, one in releases.items() if name in one["classes"]}
        deprecated = {v: inherited(own, name, "deprecated") for v, own in having.items()}
        taken = {v: inherited(own, name, "takes") | deprecated[v] for v, own in having.items()}
        is_config = any(is_training(releases[v]["classes"], name) for v in taken)
        there = spans_of({v: ["there"] for v in having}, list(releases))
        found[name] = {
            "package": package, "there": next(iter(there)), "training_arguments": is_config,
            "takes": spans_of(taken, list(releases)),
        }  # fmt: skip
        if any(deprecated.values()):
            found[name]["deprecated"] = spans_of(deprecated, list(releases))
    return found


def inherited(own: dict[str, Any], name: str, what: str) -> set[str]:
    """The arguments of a class and of its bases in the same package."""
    if name not in own:
        return set()
    found = set(own[name][what])
    if own[name]["any"] or name.endswith(("Config", "Arguments")):
        found |= {key for base in own[name]["bases"] for key in inherited(own, base, what)}
    return found


def is_training(own: dict[str, Any], name: str) -> bool:
    """Whether a class has all of transformers' TrainingArguments too."""
    bases = own[name]["bases"] if name in own else []
    return "TrainingArguments" in bases or any(is_training(own, base) for base in bases)


def spans_of(taken: Mapping[str, Iterable[str]], releases: list[str]) -> dict[str, str]:
    """ "first to last" releases → the keys that exactly those have, for each run of releases."""
    spans: dict[str, list[str]] = {}
    for key in sorted({key for keys in taken.values() for key in keys}):
        has = [key in taken.get(v, ()) for v in releases]
        parts = []
        for i, there in enumerate(has):
            if there and (i == 0 or not has[i - 1]):
                parts.append([i, i])
            elif there:
                parts[-1][1] = i
        text = ", ".join(f"{releases[a]} to {releases[b] if b + 1 < len(releases) else 'now'}" for a, b in parts)
        spans.setdefault(text, []).append(key)
    return {span: " ".join(keys) for span, keys in sorted(spans.items())}


def requires(package: str, releases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Release → what it asks of the packages that decide whether training works, extras left out."""
    found = {}
    for version, one in releases.items():
        asked = [re.sub(r"\s+|[()]", "", text) for text in one["requires"] if ";" not in text]
        named = [text for text in asked if re.split(r"[<>=!~\[]", text)[0].lower().replace("_", "-") in NEEDED]
        named.append(UNSAID.get(package, {}).get(version, ""))
        found[version] = " ".join(sorted(text for text in named if re.search(r"\d", text)))
    return {version: text for version, text in found.items() if text}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
