"""The versions that a project asks for: requirements.txt, pyproject.toml and conda's environment.yml."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from surefit.config.load import compose_yaml, parse_yaml, read_config_text
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.units import truncate_text
from surefit.facts.installs import Install
from surefit.facts.job_script import read_job_script
from surefit.facts.pins import compatible, exact
from surefit.facts.setup import SettingLocation, Setup
from surefit.facts.stack import StackFacts, stack_facts
from surefit.importers.releases import minimum_python, requirements_of
from surefit.importers.result import ImportedConfig, UnmappedKey

NAMES = re.compile(
    r"(.*[-_.])?(requirements|constraints)(\d*|[-_.].*)\.(txt|in)|pyproject\.toml|environment([-_.].*)?\.ya?ml"
)
BESIDE = re.compile(
    r".*\.(sh|bash|sbatch|slurm)|(.*[._-])?Dockerfile([._-].*)?|(uv|poetry)\.lock|.*conda.*\.(ya?ml|txt)|"
    r"setup\.py|Pipfile"
)
"""Files beside a script that may say which releases it is for, and are no requirements by their name."""
USUAL = ("uv.lock", "poetry.lock", "requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml")
"""Files whose word counts, where others beside them say something else."""
LEVELS, MOST = 6, 40
"""Folders from the script's own upwards, and files in one of them, that are looked at."""
JUDGED = ("transformers", "trl", "peft", "unsloth")
EXPORTED = re.compile(r"([A-Za-z0-9_][\w.-]*)=([\w.!+*]+)=\S+")
"""A line of `conda list --export`."""
INLINE = re.compile(r"^# /// script$(.*?)^# ///$", re.MULTILINE | re.DOTALL)
CONDA = {"pytorch": "torch"}
"""conda's name → that of the package index."""
PINNED = re.compile(r"[A-Za-z][\w.-]*(\[[\w,.-]*\])?\s*([<>=!~]=|[<>])\s*\d")
"""A requirement with versions, as setup.py lists them."""
NO_NUMBER = re.compile(r"\d{19}")
OPTION = re.compile(r"-{1,2}[A-Za-z]")
TORCHVISION, TORCHAUDIO = range(15, 25), range(9)
"""Minor releases of torchvision 0.x and torchaudio 2.x that are known to ask for one minor release of torch 2."""


@dataclass(frozen=True)
class PackageRequirement:
    """One requirement: its package, its versions, its line; whether it always holds (no marker, no extra)."""

    package: str
    versions: str
    line: int
    always: bool = True
    source: str | None = None
    isolated: bool = True


def is_requirements(path: Path) -> bool:
    """Whether the file's name is one of those that requirements have."""
    return NAMES.fullmatch(path.name) is not None or (path.suffix == ".txt" and path.parent.name == "requirements")


def read_requirements(path: Path) -> ImportedConfig:
    """What a file asks for, in the terms of an environment.

    Raises:
        ConfigError: it cannot be read, or asks for nothing.
    """
    pins, problems, lost = _parse_requirements(path)
    always = [pin for pin in pins if pin.always]
    first: dict[str, PackageRequirement] = {}
    for pin in always:
        first.setdefault(pin.package, pin)
    setup = Setup(
        "requirements", places={name: SettingLocation(name, str(path), pin.line) for name, pin in first.items()}
    )
    stack = _stack(always, wheels=_has_index(lost))
    problems += _contradictions(path, always)
    problems += _too_old_python(path, always)
    return ImportedConfig("requirements", path, setup, None, {}, tuple(lost), None, tuple(problems), stack=stack)


def _stack(pins: list[PackageRequirement], wheels: bool) -> StackFacts:
    """The environment that these requirements describe; `wheels`: they come from an index of their own."""
    names = dict.fromkeys(pin.package for pin in pins)
    asked = {name: ",".join(p.versions for p in pins if p.package == name and p.versions) for name in names}
    return StackFacts(
        versions={name: exact(text) or text for name, text in asked.items()},
        requires=_transitive_requirements(asked),
        pinned=asked,
        wheels=frozenset(names) if wheels else frozenset(pin.package for pin in pins if pin.source),
        in_place=frozenset(pin.package for pin in pins if not pin.isolated),
    )


def read_project_requirements(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What the requirements of a script's project ask for: its own header, and the files beside it and above it.

    Returns:
        Package → its versions, and package → the name of the file that says so. An exact pin counts before a range;
        of several, the first in the order of `USUAL`, and of files with other names the newest.
    """
    asked: dict[str, str] = {}
    source: dict[str, str] = {}
    for file in [path, *sorted(_files_beside(path.resolve().parent), key=_rank)]:
        for pin in _requirements_in_file(file):
            known = asked.get(pin.package)
            open_to_newer = known is None or exact(known) is None or source[pin.package] not in USUAL
            if pin.versions and open_to_newer and (known is None or _is_newer(pin.versions, known)):
                asked[pin.package], source[pin.package] = pin.versions, file.name
    return asked, source


def _rank(file: Path) -> int:
    return USUAL.index(file.name) if file.name in USUAL else len(USUAL)


def _is_newer(versions: str, known: str) -> bool:
    """Whether one is an exact pin, and the other none or one of an older release."""
    one, other = exact(versions), exact(known)
    with suppress(InvalidVersion):
        return one is not None and (other is None or Version(one) > Version(other))
    return False


def _files_beside(folder: Path) -> list[Path]:
    """The files with requirements in the nearest folder that has some, up to the top of the repository."""
    levels = [folder, *folder.parents][:LEVELS]
    top = next((i for i, level in enumerate(levels) if (level / ".git").exists()), 1)
    for level in levels[: top + 1]:
        found = sorted(entry for place in (level, level / "requirements") for entry in _entries_of(place))
        files = [entry for entry in found if is_requirements(entry) or BESIDE.fullmatch(entry.name)]
        if any(pin.package in JUDGED for file in files[:MOST] for pin in _requirements_in_file(file)):
            return files[:MOST]
    return []


def _entries_of(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_file()]
    except OSError:
        return []


@lru_cache(maxsize=64)
def _requirements_in_file(file: Path) -> tuple[PackageRequirement, ...]:
    """The requirements in a file that always hold; none where it cannot be read."""
    try:
        return tuple(pin for pin in _parse_requirements(file)[0] if pin.always)
    except SureFitError:
        return ()


def _parse_requirements(path: Path) -> tuple[list[PackageRequirement], list[SureFitError], list[UnmappedKey]]:
    """The requirements, what is wrong with them, and the lines that are not looked at."""
    if _is_shell(path):
        return _parse_installs(read_job_script(path).installs)
    text = read_config_text(path)
    if path.name == "setup.py":
        lines: Iterable[tuple[str, int, bool]] = _parse_setup_py(text)
    elif path.name == "Pipfile":
        lines = _parse_pipfile(text)
    elif path.suffix == ".py":
        lines = _parse_inline_metadata(text)
    elif path.suffix == ".lock":
        lines = _parse_lock_file(text)
    elif path.suffix == ".toml":
        lines = _parse_pyproject(text, path)
    elif path.suffix in (".yml", ".yaml"):
        lines = _parse_conda_environment(text, path)
    elif is_conda_list(text):
        lines = _parse_conda_list(text)
    else:
        lines = _parse_requirements_text(text)
    of_pip = _pip_lines(text) if path.suffix in (".yml", ".yaml") else frozenset()
    pins: list[PackageRequirement] = []
    problems: list[SureFitError] = []
    lost: list[UnmappedKey] = []
    for written, line, always in lines:
        if NO_NUMBER.search(written):
            lost.append(
                UnmappedKey(truncate_text(written), line, truncate_text(written), "no release has such a number")
            )
            continue
        try:
            pins.append(_parse_requirement(written, line, always))
        except InvalidRequirement as error:
            if (path.suffix in (".txt", ".in") or line in of_pip) and not _is_other(written):
                problems.append(_unreadable(path, written, line, error))
            else:
                lost.append(UnmappedKey(written, line, written, "it names no package and version"))
    problems += _conda_slips(text, path) if path.suffix in (".yml", ".yaml") else ()
    if not pins and not problems:
        raise ConfigError("not a file of a tool that SureFit knows: it asks for no package", code="E3029", path=path)
    return pins, problems, lost


def _is_shell(path: Path) -> bool:
    return path.suffix in (".sh", ".bash", ".sbatch", ".slurm") or "Dockerfile" in path.name


def _parse_installs(
    installs: Iterable[Install],
) -> tuple[list[PackageRequirement], list[SureFitError], list[UnmappedKey]]:
    """The packages that a shell script installs; a later command replaces what an earlier one installed."""
    pins: dict[str, PackageRequirement] = {}
    lost: list[UnmappedKey] = []
    for one in installs:
        written = "".join(_parse_conda_entry(one.written)) if one.conda else one.written
        try:
            pin = _parse_requirement(written, one.line, True)
        except InvalidRequirement:
            lost.append(UnmappedKey(one.written, one.line, one.written, "it names no package and version"))
            continue
        known = pins.pop(pin.package, None)
        if known and not pin.versions:
            pin = known  # pip leaves what is there
        pins[pin.package] = replace(pin, source=pin.source or ("index" if one.index else None), isolated=one.isolated)
    return list(pins.values()), [], lost


def stack_of_installs(installs: Iterable[Install], path: Path) -> tuple[StackFacts | None, dict[str, SettingLocation]]:
    """The environment that a shell script installs, and the places of its packages; None where it installs none."""
    pins, _, _ = _parse_installs(installs)
    if not pins:
        return None, {}
    return _stack(pins, wheels=False), {pin.package: SettingLocation(pin.package, str(path), pin.line) for pin in pins}


def is_conda_list(text: str) -> bool:
    """Whether this is what `conda list --export` or `--explicit` writes."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if "conda create --name" in text[:400]:
        return True
    exported = sum(EXPORTED.fullmatch(line) is not None for line in lines)
    return bool(lines) and (lines[0] == "@EXPLICIT" or exported > len(lines) / 2)


def _parse_conda_list(text: str) -> Iterator[tuple[str, int, bool]]:
    """NAME=VERSION=BUILD, one a line; of `--explicit`, addresses of files."""
    for number, line in enumerate(text.splitlines(), 1):
        found = EXPORTED.fullmatch(line.strip())
        if found is None:
            found = re.fullmatch(
                r"https?://\S+/([\w.-]+?)-(\d[\w.!+]*)-[^-/]+\.(?:conda|tar\.bz2)(?:#\w+)?", line.strip()
            )
        if found and found[1] != "python":
            name = found[1].lower().lstrip("_")
            yield f"{CONDA.get(name, name)}=={found[2]}", number, True


def _parse_inline_metadata(text: str) -> Iterator[tuple[str, int, bool]]:
    """The `dependencies` in a script's own header (PEP 723)."""
    found = INLINE.search(text)
    if not found:
        return
    body = re.sub(r"^# ?", "", found[1].strip("\n"), flags=re.MULTILINE)
    with suppress(ValueError, RecursionError):
        for written in _texts(tomllib.loads(body).get("dependencies")):
            yield written, _line_of(text, re.escape(written)), True


def _parse_setup_py(text: str) -> Iterator[tuple[str, int, bool]]:
    """The requirements in the lists of a setup.py that name a package with its versions, extras not told apart."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(text)):
            for each in node.elts if isinstance(node, ast.List) else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and PINNED.match(each.value):
                    yield each.value, each.lineno, True


def _parse_pipfile(text: str) -> Iterator[tuple[str, int, bool]]:
    """The packages of a Pipfile; those for development need not hold together with the rest."""
    with suppress(ValueError, RecursionError):
        tree = tomllib.loads(text)
        for name, asked in _table(tree, "packages").items():
            versions = asked.get("version") if isinstance(asked, dict) else asked
            if isinstance(versions, str):
                line = _line_of(text, rf"^\s*[\"']?{re.escape(name)}[\"']?\s*=")
                yield f"{name}{'' if versions == '*' else versions}", line, True


def _parse_lock_file(text: str) -> Iterator[tuple[str, int, bool]]:
    """The packages of uv.lock and poetry.lock, each with its one version."""
    with suppress(ValueError, RecursionError):
        for entry in tomllib.loads(text).get("package", ()):
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("version"), str):
                yield f"{entry['name']}=={entry['version']}", 1, True


def _has_index(lost: Iterable[UnmappedKey]) -> bool:
    """Whether an option names another index, or a page of files."""
    options = ("-f", "--find-links", "-i", "--index-url", "--extra-index-url")
    return any(one.key.split(maxsplit=1)[0].partition("=")[0] in options for one in lost)


def _is_other(written: str) -> bool:
    """An option, a URL or a path."""
    return (
        bool(OPTION.match(written))
        or "://" in written
        or written.startswith((".", "/"))
        or written.endswith((".whl", ".gz"))
    )


def _unreadable(path: Path, written: str, line: int, error: Exception) -> ConfigError:
    said = str(error).partition("\n")[0]
    help_text = "write NAME==VERSION, with commas between several conditions"
    return ConfigError(
        f"{truncate_text(repr(written))} is no requirement: {said}", code="E3030", path=path, line=line, help=help_text
    )


def _parse_requirement(written: str, line: int, always: bool) -> PackageRequirement:
    asked = Requirement(written)
    name = re.sub(r"[-_.]+", "-", asked.name).lower()
    return PackageRequirement(name, str(asked.specifier), line, always and asked.marker is None, asked.url)


def _parse_requirements_text(text: str) -> Iterator[tuple[str, int, bool]]:
    """The lines of a requirements file, with continued ones joined."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        joined = begun + re.sub(r"(^|\s)#.*", "", line)
        first = first if begun else number
        begun = joined[:-1] if joined.endswith("\\") else ""
        written = re.sub(r"\s--(hash|config-settings|global-option)\b.*", "", joined.strip()).strip()
        if written and not begun:
            yield written, first, True


def _parse_pyproject(text: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """[project] and [tool.poetry]; what an extra or a group asks for need not hold together with the rest."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the first also for a number that Python does not read
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else None
        problem = str(error).partition(" (at")[0]
        raise ConfigError(
            f"not valid TOML: {problem}", code="E3031", path=path, line=line, help="correct the line"
        ) from None
    project, poetry = _table(tree, "project"), _table(_table(tree, "tool"), "poetry")
    optional = [each for group in _table(project, "optional-dependencies").values() for each in _texts(group)]
    for written, always in [
        *((each, True) for each in _texts(project.get("dependencies"))),
        *((x, False) for x in optional),
    ]:
        yield written, _line_of(text, re.escape(written)), always
    for name, asked in _table(poetry, "dependencies").items():
        versions = asked.get("version") if isinstance(asked, dict) else asked
        always = not (
            isinstance(asked, dict) and (asked.get("optional") or asked.get("markers") or asked.get("python"))
        )
        if name != "python" and isinstance(versions, str):
            yield f"{name}{_to_pep440(versions)}", _line_of(text, rf"^\s*[\"']?{re.escape(name)}[\"']?\s*="), always


def _table(tree: Any, name: str) -> dict[str, Any]:
    found = tree.get(name) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _line_of(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _to_pep440(versions: str) -> str:
    """Poetry's ^1.2 and ~1.2 in the words of PEP 440.

    >>> _to_pep440("^2.1"), _to_pep440("^0.19"), _to_pep440("~4.3"), _to_pep440("1.26.4"), _to_pep440("*")
    ('>=2.1,<3', '>=0.19,<0.20', '>=4.3,<4.4', '==1.26.4', '')
    """
    parts = [part.strip() for part in versions.split(",")]
    return ",".join(filter(None, map(_to_pep440_part, parts)))


def _to_pep440_part(part: str) -> str:
    found = re.fullmatch(r"([\^~]?)\s*v?(\d{1,18}(?:\.\d{1,18})*)", part)
    if not found:
        return "" if part == "*" else f"=={part}" if re.fullmatch(r"[\d.]+\.\*", part) else part
    numbers = [int(number) for number in found[2].split(".")]
    if not found[1]:
        return f"=={found[2]}"
    kept = (
        next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
        if found[1] == "^"
        else min(1, len(numbers) - 1)
    )
    above = ".".join(map(str, [*numbers[:kept], numbers[kept] + 1]))
    return f">={found[2]},<{above}"


def _parse_conda_environment(text: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    parse_yaml(text, path)
    for entry in _entries(compose_yaml(text), "dependencies"):
        if isinstance(entry, yaml.ScalarNode):
            name, versions = _parse_conda_entry(entry.value)
            if name != "python":
                yield f"{CONDA.get(name, name)}{versions}", entry.start_mark.line + 1, True
        for written in _entries(entry, "pip"):
            if isinstance(written, yaml.ScalarNode):
                yield written.value, written.start_mark.line + 1, True


def _pip_lines(text: str) -> frozenset[int]:
    """The lines of what a conda environment has pip install."""
    listed = (each for entry in _entries(compose_yaml(text), "dependencies") for each in _entries(entry, "pip"))
    return frozenset(each.start_mark.line + 1 for each in listed)


def _entries(node: yaml.Node | None, key: str) -> list[yaml.Node]:
    """The entries of the list under a key, where there is one."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return [
        each
        for name, listed in pairs
        if name.value == key and isinstance(listed, yaml.SequenceNode)
        for each in listed.value
    ]


def _parse_conda_entry(entry: str) -> tuple[str, str]:
    """(name, versions) of `channel::name=1.2=build`, where = stands for every release that begins so."""
    found = re.fullmatch(r"(?:[^:]+::)?([A-Za-z0-9._-]+)\s*(.*)", entry.strip())
    if not found:
        return entry, ""
    single = re.fullmatch(r"=\s*([\d.]+)\*?(=.*)?", found[2])
    return found[1].lower(), f"=={single[1].rstrip('.')}.*" if single else found[2].replace(" ", ",").strip(",")


def _transitive_requirements(asked: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """What packages pinned to a release ask of others: by what is known of them, or as the same release here does."""
    installed = stack_facts()
    found: dict[str, tuple[str, ...]] = {}
    for name, versions in asked.items():
        begun = re.fullmatch(r"==(\d+\.\d+[\d.]*)\.\*", versions)  # conda's = stands for every release that begins so
        pinned = exact(versions) or (begun[1] if begun else None)
        if pinned is None:
            continue
        same = begun is None and installed.versions.get(name, "").partition("+")[0] == pinned.partition("+")[0]
        own = [text for text in installed.requires.get(name, ()) if ";" not in text and "[" not in text] if same else []
        found[name] = tuple(text.replace(" ", "") for text in own) or tuple(_known_requirements(name, pinned))
    return {name: texts for name, texts in found.items() if texts}


def _known_requirements(name: str, version: str) -> Iterator[str]:
    """Facts of releases: torchvision 0.N belongs to torch 2.(N-15), torchaudio 2.N to torch 2.N.

    tensorboard 2.10 and 2.11 ask for protobuf below 3.20 and 4 (their metadata; 2.12 takes any from 3.19.6).
    """
    yield from requirements_of(name, version)
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2]]
    if len(numbers) < 2:
        return
    major, minor = numbers
    if name == "torchvision" and major == 0 and minor in TORCHVISION:
        yield f"torch==2.{minor - 15}.*"
    elif name == "torchaudio" and major == 2 and minor in TORCHAUDIO:
        yield f"torch==2.{minor}.*"
    elif name == "tensorboard" and major == 2 and minor in (10, 11):
        yield "protobuf<3.20" if minor == 10 else "protobuf<4"


def _too_old_python(path: Path, pins: list[PackageRequirement]) -> Iterator[ConfigError]:
    """A Python that none of the releases of a package that is asked for runs on."""
    text = read_config_text(path) if path.suffix in (".yml", ".yaml", ".toml") else ""
    python, line = _required_python(text, path)
    needs = ((pin, minimum_python(pin.package, pin.versions)) for pin in pins)
    late = [(pin, least) for pin, least in needs if python and least and not compatible(python, f">={least}")]
    for pin, least in sorted(late, key=lambda each: Version(each[1]), reverse=True)[:1]:
        yield ConfigError(
            f"{pin.package}{pin.versions} needs Python {least} or newer, and python{python} is asked for",
            code="E3950", path=path, line=line, field="python", help=f"ask for Python {least} or newer",
        )  # fmt: skip


def _required_python(text: str, path: Path) -> tuple[str, int]:
    """(the versions of Python that a conda or project file admits, the line that says so)."""
    if path.suffix == ".toml":
        tree = tomllib.loads(text)
        poetry = _table(_table(_table(tree, "tool"), "poetry"), "dependencies").get("python")
        asked = _table(tree, "project").get("requires-python")
        found = asked if isinstance(asked, str) else _to_pep440(poetry) if isinstance(poetry, str) else ""
        return found, _line_of(text, r"^\s*(requires-)?python\s*=")
    for entry in _entries(compose_yaml(text), "dependencies") if text else ():
        name, versions = _parse_conda_entry(entry.value) if isinstance(entry, yaml.ScalarNode) else ("", "")
        if name == "python" and re.match(r"[<>=!~]", versions):
            return versions, entry.start_mark.line + 1
    return "", 1


SECTIONS = ("name", "channels", "dependencies", "variables", "prefix", "platforms", "category", "platform")
"""What stands at the top of a conda environment's file, or of conda-lock's."""


def _conda_slips(text: str, path: Path) -> Iterator[ConfigError]:
    """Packages that stand where conda does not look for them."""
    tree = compose_yaml(text)
    pairs = tree.value if isinstance(tree, yaml.MappingNode) else ()
    for key, _ in pairs:
        if key.value not in SECTIONS and key.value in ("pip", "packages", "requirements", "conda", "deps"):
            yield ConfigError(
                f"conda knows no {key.value} at the top of an environment's file: nothing of it is installed",
                code="E3951", path=path, line=key.start_mark.line + 1, field=str(key.value),
                help="write it as the last entry of dependencies: `- pip: [NAME==VERSION, …]`",
            )  # fmt: skip
    for entry in _entries(tree, "dependencies"):
        for key, listed in entry.value if isinstance(entry, yaml.MappingNode) else ():
            if key.value == "pip" and not isinstance(listed, yaml.SequenceNode):
                yield ConfigError(
                    "pip needs a list of requirements", code="E3952", path=path, line=key.start_mark.line + 1,
                    field="pip", help="write each below it, as an entry of its own",
                )  # fmt: skip


def _contradictions(path: Path, pins: list[PackageRequirement]) -> Iterator[ConfigError]:
    """Packages that are asked for twice, in versions that no release can be."""
    for i, pin in enumerate(pins):
        if pin.versions and not compatible(pin.versions, ""):
            yield ConfigError(
                f"no release of {pin.package} is {pin.versions}",
                code="E3032", path=path, line=pin.line, field=pin.package,
                help="correct one of the bounds",
            )  # fmt: skip
            continue
        other = next((each for each in pins[:i] if each.package == pin.package), None)
        if other is not None and not compatible(pin.versions, other.versions):
            there = f"{pin.package}{other.versions} on line {other.line}"
            yield ConfigError(
                f"{pin.package}{pin.versions}, and {there}: no release is both", code="E3033", path=path, line=pin.line,
                field=pin.package, help="keep one of the two",
            )  # fmt: skip
