"""Write src/surefit/importers/schemas/requirements.json: what releases of training tools ask of other packages.

python scripts/package_requirements.py REPORTS

REPORTS is a folder with a report per release, as `pip install --dry-run --no-deps --ignore-requires-python --report
FILE axolotl==0.19.0` writes it. Markers are read for Linux on x86-64. Of the packages of `INTERPRETER` only the Python
that they need is kept: the first release known to need each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

OUTPUT = Path(__file__).parent.parent / "src/surefit/importers/schemas/requirements.json"
TOOLS = ("axolotl", "llamafactory", "unsloth")
INTERPRETER = ("transformers", "trl", "peft", "accelerate", "datasets", "torch", "bitsandbytes")
NEEDED = frozenset({
    "torch", "torchvision", "torchaudio", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers",
    "huggingface-hub", "bitsandbytes", "numpy", "xformers", "triton", "liger-kernel", "deepspeed", "unsloth-zoo",
    "torchao", "pydantic", "pandas", "gradio", "wandb",
})  # fmt: skip
BUILT = frozenset({"torch", "xformers", "triton", "torchao"})
"""What Axolotl's setup.py asked for by the torch that it found, until its releases came as wheels (0.17)."""
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def main(reports: Path) -> int:
    """Read every report and write the table."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in reports.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))["install"][0]["metadata"]
        found.setdefault(canonicalize_name(data["name"]), {})[data["version"]] = data
    table = {
        "requires": {name: {v: asked(found[name][v]) for v in ordered(found[name])} for name in TOOLS},
        "python": {name: pythons(found[name]) for name in (*TOOLS, *INTERPRETER)},
    }
    OUTPUT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size:,} bytes")
    return 0


def ordered(releases: dict[str, Any]) -> list[str]:
    """Return the versions, oldest first."""
    return sorted(releases, key=Version)


def asked(data: dict[str, Any]) -> str:
    """Return what a release asks of the packages of `NEEDED` on Linux, without its extras."""
    named = []
    for text in data.get("requires_dist", ()):
        one = Requirement(text)
        applies = one.marker is None or Marker(str(one.marker)).evaluate({**LINUX, "extra": ""})
        name = canonicalize_name(one.name)
        by_torch = data["name"] == "axolotl" and Version(data["version"]) < Version("0.17") and name in BUILT
        if applies and name in NEEDED and one.specifier and not by_torch:
            named.append(f"{name}{one.specifier}")
    return " ".join(sorted(set(named)))


def pythons(releases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the first release that needs each least Python → that Python."""
    least: dict[str, str] = {}
    for version in ordered(releases):
        bounds = [
            part.version
            for part in SpecifierSet(releases[version].get("requires_python") or "")
            if part.operator == ">="
        ]
        needed = ".".join(bounds[0].split(".")[:2]) if bounds else ""
        if needed and needed not in least.values():
            least[version] = needed
    return least


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
