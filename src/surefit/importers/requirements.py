"""Package versions that a project requires: requirements.txt, pyproject.toml and conda's environment.yml."""

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
"""Files beside a script that may state the releases it needs, besides those that `NAMES` matches."""
USUAL = ("uv.lock", "poetry.lock", "requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml")
"""Files that take precedence over the others beside them, in this order."""
LEVELS, MOST = 6, 40
"""The largest number of folders searched from the script's own upwards, and of files read in one of them."""
JUDGED = ("transformers", "trl", "peft", "unsloth")
CONDA_URL = re.compile(r"https?://\S+/([\w.-]+?)-(\d[\w.!+]*)-[^-/]+\.(?:conda|tar\.bz2)(?:#\w+)?")
EXPORTED = re.compile(r"([A-Za-z0-9_][\w.-]*)=([\w.!+*]+)=\S+")
"""A line of `conda list --export`."""
INLINE = re.compile(r"^# /// script$(.*?)^# ///$", re.MULTILINE | re.DOTALL)
CONDA = {"pytorch": "torch"}
"""conda's package name → PyPI's."""
PINNED = re.compile(r"[A-Za-z][\w.-]*(\[[\w,.-]*\])?\s*([<>=!~]=|[<>])\s*\d")
"""A requirement with versions, as setup.py lists them."""
NO_NUMBER = re.compile(r"\d{19}")
OPTION = re.compile(r"-{1,2}[A-Za-z]")
TORCHVISION, TORCHAUDIO = range(15, 25), range(9)
"""Minor releases of torchvision 0.x and torchaudio 2.x known to require one minor release of torch 2."""


@dataclass(frozen=True)
class PackageRequirement:
    """One requirement: its package, its versions, its line, and whether it always applies (no marker, no extra)."""

    package: str
    versions: str
    line: int
    always: bool = True
    source: str | None = None
    isolated: bool = True


def is_requirements(path: Path) -> bool:
    """Return whether the file's name is a usual name of a requirements file."""
    return NAMES.fullmatch(path.name) is not None or (path.suffix == ".txt" and path.parent.name == "requirements")


def read_requirements(path: Path) -> ImportedConfig:
    """Return a requirements file as an imported config that describes an environment.

    Raises:
        ConfigError: it cannot be read, or requires nothing.
    """
    pins, problems, lost = _parse_requirements(path)
    required = [pin for pin in pins if pin.always]
    first_pins: dict[str, PackageRequirement] = {}
    for pin in required:
        first_pins.setdefault(pin.package, pin)
    setup = Setup(
        "requirements", places={name: SettingLocation(name, str(path), pin.line) for name, pin in first_pins.items()}
    )
    stack = _stack(required, wheels=_has_index(lost))
    problems += _contradictions(path, required)
    problems += _too_old_python(path, required)
    return ImportedConfig("requirements", path, setup, None, {}, tuple(lost), None, tuple(problems), stack=stack)


def _stack(pins: list[PackageRequirement], wheels: bool) -> StackFacts:
    """Return the environment that these requirements describe; `wheels`: they come from another index."""
    names = dict.fromkeys(pin.package for pin in pins)
    specifiers = {name: ",".join(p.versions for p in pins if p.package == name and p.versions) for name in names}
    return StackFacts(
        versions={name: exact(text) or text for name, text in specifiers.items()},
        requires=_transitive_requirements(specifiers),
        pinned=specifiers,
        wheels=frozenset(names) if wheels else frozenset(pin.package for pin in pins if pin.source),
        in_place=frozenset(pin.package for pin in pins if not pin.isolated),
    )


def read_project_requirements(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions that a script's project requires: by the script's own header, and by files beside it or above
    it.

    Returns:
        Package → its versions, and package → the name of the file with that requirement. An exact pin takes precedence
        over a range; of several pins, the first in the order of `USUAL`, and of files with other names the newest
        release.
    """
    specifiers: dict[str, str] = {}
    file_names: dict[str, str] = {}
    for file in [path, *sorted(_files_beside(path.resolve().parent), key=_rank)]:
        for pin in _requirements_in_file(file):
            previous = specifiers.get(pin.package)
            open_to_newer = previous is None or exact(previous) is None or file_names[pin.package] not in USUAL
            if pin.versions and open_to_newer and (previous is None or _is_newer(pin.versions, previous)):
                specifiers[pin.package], file_names[pin.package] = pin.versions, file.name
    return specifiers, file_names


def _rank(file: Path) -> int:
    return USUAL.index(file.name) if file.name in USUAL else len(USUAL)


def _is_newer(versions: str, known: str) -> bool:
    """Return whether `versions` is an exact pin, and `known` no pin or one of an older release."""
    release, known_release = exact(versions), exact(known)
    with suppress(InvalidVersion):
        return release is not None and (known_release is None or Version(release) > Version(known_release))
    return False


def _files_beside(folder: Path) -> list[Path]:
    """Return the requirements files in the nearest folder that has some, up to the top of the repository."""
    levels = [folder, *folder.parents][:LEVELS]
    top = next((i for i, level in enumerate(levels) if (level / ".git").exists()), 1)
    for level in levels[: top + 1]:
        entries = sorted(entry for place in (level, level / "requirements") for entry in _entries_of(place))
        files = [entry for entry in entries if is_requirements(entry) or BESIDE.fullmatch(entry.name)]
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
    """Return the requirements in a file that always apply; none if it cannot be read."""
    try:
        return tuple(pin for pin in _parse_requirements(file)[0] if pin.always)
    except SureFitError:
        return ()


def _parse_requirements(path: Path) -> tuple[list[PackageRequirement], list[SureFitError], list[UnmappedKey]]:
    """Return the requirements, the errors in them, and the lines that are not read."""
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
    pip_lines = _pip_lines(text) if path.suffix in (".yml", ".yaml") else frozenset()
    pins: list[PackageRequirement] = []
    problems: list[SureFitError] = []
    lost: list[UnmappedKey] = []
    for entry, line, always in lines:
        if NO_NUMBER.search(entry):
            lost.append(UnmappedKey(truncate_text(entry), line, truncate_text(entry), "there is no such release"))
            continue
        try:
            pins.append(_parse_requirement(entry, line, always))
        except InvalidRequirement as error:
            if (path.suffix in (".txt", ".in") or line in pip_lines) and not _is_other(entry):
                problems.append(_unreadable(path, entry, line, error))
            else:
                lost.append(UnmappedKey(entry, line, entry, "it names no package and version"))
    problems += _conda_slips(text, path) if path.suffix in (".yml", ".yaml") else ()
    if not pins and not problems:
        raise ConfigError("not a file of a tool that SureFit knows: it requires no package", code="E3029", path=path)
    return pins, problems, lost


def _is_shell(path: Path) -> bool:
    return path.suffix in (".sh", ".bash", ".sbatch", ".slurm") or "Dockerfile" in path.name


def _parse_installs(
    installs: Iterable[Install],
) -> tuple[list[PackageRequirement], list[SureFitError], list[UnmappedKey]]:
    """Return the packages that a shell script installs; a later command replaces what an earlier one installed."""
    pins: dict[str, PackageRequirement] = {}
    lost: list[UnmappedKey] = []
    for install in installs:
        requirement = "".join(_parse_conda_entry(install.written)) if install.conda else install.written
        try:
            pin = _parse_requirement(requirement, install.line, True)
        except InvalidRequirement:
            lost.append(UnmappedKey(install.written, install.line, install.written, "it names no package and version"))
            continue
        previous = pins.pop(pin.package, None)
        if previous and not pin.versions:
            pin = previous  # pip keeps the installed version
        pins[pin.package] = replace(
            pin, source=pin.source or ("index" if install.index else None), isolated=install.isolated
        )
    return list(pins.values()), [], lost


def stack_of_installs(installs: Iterable[Install], path: Path) -> tuple[StackFacts | None, dict[str, SettingLocation]]:
    """Return the environment that a shell script installs and the locations of its packages; None if it installs
    none."""
    pins, _, _ = _parse_installs(installs)
    if not pins:
        return None, {}
    return _stack(pins, wheels=False), {pin.package: SettingLocation(pin.package, str(path), pin.line) for pin in pins}


def is_conda_list(text: str) -> bool:
    """Return whether a text is the output of `conda list --export` or `--explicit`."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if "conda create --name" in text[:400]:
        return True
    exported = sum(EXPORTED.fullmatch(line) is not None for line in lines)
    return bool(lines) and (lines[0] == "@EXPLICIT" or exported > len(lines) / 2)


def _parse_conda_list(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the packages in lines NAME=VERSION=BUILD; in the output of `--explicit`, URLs of package files."""
    for number, line in enumerate(text.splitlines(), 1):
        match = EXPORTED.fullmatch(line.strip())
        if match is None:
            match = CONDA_URL.fullmatch(line.strip())
        if match and match[1] != "python":
            name = match[1].lower().lstrip("_")
            yield f"{CONDA.get(name, name)}=={match[2]}", number, True


def _parse_inline_metadata(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the `dependencies` in a script's inline metadata (PEP 723)."""
    match = INLINE.search(text)
    if not match:
        return
    body = re.sub(r"^# ?", "", match[1].strip("\n"), flags=re.MULTILINE)
    with suppress(ValueError, RecursionError):
        for requirement in _texts(tomllib.loads(body).get("dependencies")):
            yield requirement, _line_of(text, re.escape(requirement)), True


def _parse_setup_py(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the requirements with versions in the lists of a setup.py, without telling extras apart."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(text)):
            for item in node.elts if isinstance(node, ast.List) else ():
                if isinstance(item, ast.Constant) and isinstance(item.value, str) and PINNED.match(item.value):
                    yield item.value, item.lineno, True


def _parse_pipfile(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the packages of a Pipfile; development packages need not be compatible with them and are left out."""
    with suppress(ValueError, RecursionError):
        tree = tomllib.loads(text)
        for name, entry in _table(tree, "packages").items():
            versions = entry.get("version") if isinstance(entry, dict) else entry
            if isinstance(versions, str):
                line = _line_of(text, rf"^\s*[\"']?{re.escape(name)}[\"']?\s*=")
                yield f"{name}{'' if versions == '*' else versions}", line, True


def _parse_lock_file(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the packages of uv.lock and poetry.lock, each with its locked version."""
    with suppress(ValueError, RecursionError):
        for entry in tomllib.loads(text).get("package", ()):
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("version"), str):
                yield f"{entry['name']}=={entry['version']}", 1, True


def _has_index(lost: Iterable[UnmappedKey]) -> bool:
    """Return whether an option names another package index or a page of links."""
    options = ("-f", "--find-links", "-i", "--index-url", "--extra-index-url")
    return any(line.key.split(maxsplit=1)[0].partition("=")[0] in options for line in lost)


def _is_other(written: str) -> bool:
    """Return whether a line is an option, a URL or a path."""
    is_path = written.startswith((".", "/")) or written.endswith((".whl", ".gz"))
    return is_path or "://" in written or bool(OPTION.match(written))


def _unreadable(path: Path, written: str, line: int, error: Exception) -> ConfigError:
    reason = str(error).partition("\n")[0]
    help_text = "write NAME==VERSION, with commas between several conditions"
    return ConfigError(
        f"{truncate_text(repr(written))} is not a requirement: {reason}",
        code="E3030",
        path=path,
        line=line,
        help=help_text,
    )


def _parse_requirement(written: str, line: int, always: bool) -> PackageRequirement:
    requirement = Requirement(written)
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    return PackageRequirement(
        name, str(requirement.specifier), line, always and requirement.marker is None, requirement.url
    )


def _parse_requirements_text(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the lines of a requirements file, with continuation lines joined."""
    continued, first_line = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        joined = continued + re.sub(r"(^|\s)#.*", "", line)
        first_line = first_line if continued else number
        continued = joined[:-1] if joined.endswith("\\") else ""
        requirement = re.sub(r"\s--(hash|config-settings|global-option)\b.*", "", joined.strip()).strip()
        if requirement and not continued:
            yield requirement, first_line, True


def _parse_pyproject(text: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the requirements in [project] and [tool.poetry]; those of an extra or a group need not hold together."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError is raised for an integer with too many digits, too
        match = re.search(r"line (\d+)", str(error))
        line = int(match[1]) if match else None
        problem = str(error).partition(" (at")[0]
        raise ConfigError(
            f"not valid TOML: {problem}", code="E3031", path=path, line=line, help="correct the line"
        ) from None
    project, poetry = _table(tree, "project"), _table(_table(tree, "tool"), "poetry")
    optional = [
        requirement for group in _table(project, "optional-dependencies").values() for requirement in _texts(group)
    ]
    for requirement, always in [
        *((requirement, True) for requirement in _texts(project.get("dependencies"))),
        *((requirement, False) for requirement in optional),
    ]:
        yield requirement, _line_of(text, re.escape(requirement)), always
    for name, entry in _table(poetry, "dependencies").items():
        versions = entry.get("version") if isinstance(entry, dict) else entry
        always = not (
            isinstance(entry, dict) and (entry.get("optional") or entry.get("markers") or entry.get("python"))
        )
        if name != "python" and isinstance(versions, str):
            yield f"{name}{_to_pep440(versions)}", _line_of(text, rf"^\s*[\"']?{re.escape(name)}[\"']?\s*="), always


def _table(tree: Any, name: str) -> dict[str, Any]:
    value = tree.get(name) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _line_of(text: str, pattern: str) -> int:
    match = re.search(pattern, text, re.MULTILINE)
    return text.count("\n", 0, match.start()) + 1 if match else 1


def _to_pep440(versions: str) -> str:
    """Return Poetry's ^1.2 and ~1.2 as a PEP 440 specifier.

    >>> _to_pep440("^2.1"), _to_pep440("^0.19"), _to_pep440("~4.3"), _to_pep440("1.26.4"), _to_pep440("*")
    ('>=2.1,<3', '>=0.19,<0.20', '>=4.3,<4.4', '==1.26.4', '')
    """
    parts = [part.strip() for part in versions.split(",")]
    return ",".join(filter(None, map(_to_pep440_part, parts)))


def _to_pep440_part(part: str) -> str:
    match = re.fullmatch(r"([\^~]?)\s*v?(\d{1,18}(?:\.\d{1,18})*)", part)
    if not match:
        return "" if part == "*" else f"=={part}" if re.fullmatch(r"[\d.]+\.\*", part) else part
    numbers = [int(number) for number in match[2].split(".")]
    if not match[1]:
        return f"=={match[2]}"
    last = (
        next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
        if match[1] == "^"
        else min(1, len(numbers) - 1)
    )
    bound = ".".join(map(str, [*numbers[:last], numbers[last] + 1]))
    return f">={match[2]},<{bound}"


def _parse_conda_environment(text: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    parse_yaml(text, path)
    for entry in _entries(compose_yaml(text), "dependencies"):
        if isinstance(entry, yaml.ScalarNode):
            name, versions = _parse_conda_entry(entry.value)
            if name != "python":
                yield f"{CONDA.get(name, name)}{versions}", entry.start_mark.line + 1, True
        for line in _entries(entry, "pip"):
            if isinstance(line, yaml.ScalarNode):
                yield line.value, line.start_mark.line + 1, True


def _pip_lines(text: str) -> frozenset[int]:
    """Return the lines of the packages that a conda environment installs with pip."""
    pip_entries = (
        requirement for entry in _entries(compose_yaml(text), "dependencies") for requirement in _entries(entry, "pip")
    )
    return frozenset(requirement.start_mark.line + 1 for requirement in pip_entries)


def _entries(node: yaml.Node | None, key: str) -> list[yaml.Node]:
    """Return the entries of the list under a key, if there is one."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return [
        entry
        for name, value in pairs
        if name.value == key and isinstance(value, yaml.SequenceNode)
        for entry in value.value
    ]


def _parse_conda_entry(entry: str) -> tuple[str, str]:
    """Return (name, versions) of `channel::name=1.2=build`; conda's = matches every release with this prefix."""
    match = re.fullmatch(r"(?:[^:]+::)?([A-Za-z0-9._-]+)\s*(.*)", entry.strip())
    if not match:
        return entry, ""
    single = re.fullmatch(r"=\s*([\d.]+)\*?(=.*)?", match[2])
    return match[1].lower(), f"=={single[1].rstrip('.')}.*" if single else match[2].replace(" ", ",").strip(",")


def _transitive_requirements(asked: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return what packages pinned to a release require of others, from known facts or the same release if installed
    here."""
    installed = stack_facts()
    requirements: dict[str, tuple[str, ...]] = {}
    for name, versions in asked.items():
        prefix = re.fullmatch(r"==(\d+\.\d+[\d.]*)\.\*", versions)  # conda's = matches every release with this prefix
        pinned = exact(versions) or (prefix[1] if prefix else None)
        if pinned is None:
            continue
        is_installed = prefix is None and installed.versions.get(name, "").partition("+")[0] == pinned.partition("+")[0]
        installed_requirements = (
            [text for text in installed.requires.get(name, ()) if ";" not in text and "[" not in text]
            if is_installed
            else []
        )
        requirements[name] = tuple(text.replace(" ", "") for text in installed_requirements) or tuple(
            _known_requirements(name, pinned)
        )
    return {name: texts for name, texts in requirements.items() if texts}


def _known_requirements(name: str, version: str) -> Iterator[str]:
    """Yield the known requirements of a release: torchvision 0.N needs torch 2.(N-15), torchaudio 2.N needs torch 2.N.

    tensorboard 2.10 and 2.11 require protobuf below 3.20 and 4 (their metadata; 2.12 accepts any from 3.19.6).
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
    """Yield an error if the required Python is too old for all matching releases of a package."""
    text = read_config_text(path) if path.suffix in (".yml", ".yaml", ".toml") else ""
    python, line = _required_python(text, path)
    needs = ((pin, minimum_python(pin.package, pin.versions)) for pin in pins)
    too_new = [(pin, least) for pin, least in needs if python and least and not compatible(python, f">={least}")]
    for pin, least in sorted(too_new, key=lambda each: Version(each[1]), reverse=True)[:1]:
        yield ConfigError(
            f"{pin.package}{pin.versions} needs Python {least} or newer, but the file requires python{python}",
            code="E3950", path=path, line=line, field="python", help=f"require Python {least} or newer",
        )  # fmt: skip


def _required_python(text: str, path: Path) -> tuple[str, int]:
    """Return (the Python versions that a conda or project file allows, the line with them)."""
    if path.suffix == ".toml":
        tree = tomllib.loads(text)
        poetry = _table(_table(_table(tree, "tool"), "poetry"), "dependencies").get("python")
        declared = _table(tree, "project").get("requires-python")
        allowed = declared if isinstance(declared, str) else _to_pep440(poetry) if isinstance(poetry, str) else ""
        return allowed, _line_of(text, r"^\s*(requires-)?python\s*=")
    for entry in _entries(compose_yaml(text), "dependencies") if text else ():
        name, versions = _parse_conda_entry(entry.value) if isinstance(entry, yaml.ScalarNode) else ("", "")
        if name == "python" and re.match(r"[<>=!~]", versions):
            return versions, entry.start_mark.line + 1
    return "", 1


SECTIONS = ("name", "channels", "dependencies", "variables", "prefix", "platforms", "category", "platform")
"""Top-level keys of a conda environment file and of conda-lock's files."""


def _conda_slips(text: str, path: Path) -> Iterator[ConfigError]:
    """Yield errors for packages listed where conda does not read them."""
    tree = compose_yaml(text)
    pairs = tree.value if isinstance(tree, yaml.MappingNode) else ()
    for key, _ in pairs:
        if key.value not in SECTIONS and key.value in ("pip", "packages", "requirements", "conda", "deps"):
            yield ConfigError(
                f"conda ignores {key.value} at the top of an environment file: none of it is installed",
                code="E3951", path=path, line=key.start_mark.line + 1, field=str(key.value),
                help="write it as the last entry of dependencies: `- pip: [NAME==VERSION, …]`",
            )  # fmt: skip
    for entry in _entries(tree, "dependencies"):
        for key, value in entry.value if isinstance(entry, yaml.MappingNode) else ():
            if key.value == "pip" and not isinstance(value, yaml.SequenceNode):
                yield ConfigError(
                    "pip needs a list of requirements", code="E3952", path=path, line=key.start_mark.line + 1,
                    field="pip", help="write each below it, as a separate entry",
                )  # fmt: skip


def _contradictions(path: Path, pins: list[PackageRequirement]) -> Iterator[ConfigError]:
    """Yield errors for packages required twice in versions that no release satisfies."""
    for i, pin in enumerate(pins):
        if pin.versions and not compatible(pin.versions, ""):
            yield ConfigError(
                f"no release of {pin.package} is {pin.versions}",
                code="E3032", path=path, line=pin.line, field=pin.package,
                help="correct one of the bounds",
            )  # fmt: skip
            continue
        earlier = next((candidate for candidate in pins[:i] if candidate.package == pin.package), None)
        if earlier is not None and not compatible(pin.versions, earlier.versions):
            conflict = f"{pin.package}{earlier.versions} on line {earlier.line}"
            yield ConfigError(
                f"{pin.package}{pin.versions}, but {conflict}: no release matches both", code="E3033", path=path,
                line=pin.line, field=pin.package, help="keep one of the two",
            )  # fmt: skip
