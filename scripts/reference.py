"""Writes docs/reference/ from what the code says of itself: the config from its schema, the rules from their pages,
what cannot be combined, the GPUs and the error codes from their source; and docs/built.md from the import contract.

python scripts/reference.py          (or `make reference`; a test compares the pages with the code)
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from surefit.config.capabilities import CONFLICTS, Trait
from surefit.config.load import expected_text
from surefit.config.modes import MODES
from surefit.config.schema import SureFitConfig
from surefit.core.rundir import write_atomic
from surefit.core.svg import document
from surefit.core.units import GIB
from surefit.facts.error_texts import known_errors
from surefit.facts.gpus import GPUS, SEEN_SHARE
from surefit.lint.engine import all_rules

ROOT = Path(__file__).parents[1]
ERROR_CODE = re.compile(r"E\d{4}")
SOURCE, OUTPUT = ROOT / "src" / "surefit", ROOT / "docs" / "reference"


def config_page() -> str:
    """Every key: what it takes, its default, what it does."""
    lines = [
        "# The config",
        "",
        "YAML, read by the 1.2 core rules: `2e-4` is a number, `no` is a text. Unknown keys are refused. Any value can",
        "be set for one call: `surefit train run.yaml --set train.num_train_epochs=2`. `auto` is decided from model,",
        "data and machine; `resolved.yaml` in the run directory says what was decided, and why.",
        "",
    ]
    top = {name: field for name, field in SureFitConfig.model_fields.items() if not _is_section(field.annotation)}
    lines += ["## At the top", "", *_table(top, "")]
    for name, field in SureFitConfig.model_fields.items():
        if _is_section(field.annotation):
            lines += [f"## {name}", "", field.description or "", "", *_section(field.annotation, f"{name}.")]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Any, prefix: str) -> list[str]:
    lines = _table(section.model_fields, prefix)
    for name, field in section.model_fields.items():
        inner = next((option for option in getattr(field.annotation, "__args__", ()) if _is_section(option)), None)
        if inner is not None:
            lines += [f"### {prefix}{name}", "", field.description or "", "", *_section(inner, f"{prefix}{name}.")]
    return lines


def _table(fields: Any, prefix: str) -> list[str]:
    lines = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else f"`{_yaml(default)}`"
        lines.append(_row(f"`{name}`", expected_text(f"{prefix}{name}"), shown, field.description or ""))
    return [*lines, ""]


def _row(*cells: str) -> str:
    """A row of a table in Markdown: each cell on one line, and what would be HTML or another column as it is written.

    >>> _row("`a`", "'x' | 'y'", "Tokens such as <call>,\\nand `<b>`.")
    "| `a` | 'x' \\\\| 'y' | Tokens such as &lt;call&gt;, and `<b>`. |"
    """
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    # Within backquotes < is no HTML; a | ends a cell there, too.
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if n % 2 else part.replace("<", "&lt;").replace(">", "&gt;") for n, part in enumerate(parts))


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def rules_page() -> str:
    """Every rule, as `surefit explain CODE` shows it."""
    rules = all_rules()
    lines = ["# The rules of `surefit check`", "", "| code | severity | what it finds |", "|---|---|---|"]
    lines += [_row(f"[{r.code}](#{r.code.lower()})", r.severity, r.summary) for r in rules]
    for rule in rules:
        # As words and not as headings: 1,600 of them would stand before every guide in the site's search.
        page = re.sub(r"\n## (.+)", r"\n**\1**", rule.doc)
        lines += ["", f"## {rule.code}", "", f"*{rule.name}, {rule.severity}.* {page}"]
    return "\n".join(lines) + "\n"


def combinations_page() -> str:
    """The modes, and what cannot be combined, rows of one reason in one line."""
    lines = [
        "# The parallel modes, and what cannot be combined",
        "",
        "| `parallel.mode` | what each process has | the same examples are read by | `parallel.offload` moves |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {mode.holds} | {f'`parallel.{name}` processes' if mode.grouped else 'one process'} | "
            f"{_OFFLOADED[mode.divided] if mode.sharded else '–'} |"
            for name, mode in MODES.items()
        ),
        "",
        "`fsdp` can be combined with `parallel.cp`: that many processes then read the same examples.",
        "",
        "## What cannot be combined",
        "",
        "Everything else can be combined: `tests/combinations` trains two steps of combinations that cover every",
        "pair of values of fourteen settings, with every `auto` decided for seven kinds of hardware. `check` names",
        "each row that a config meets, `auto` and the search of `surefit plan` choose none, and training refuses by",
        "the same table (`config/capabilities.py`).",
        "",
        "| with | not | why | rule |",
        "|---|---|---|---|",
    ]
    refused: dict[tuple[str, str, Trait], list[Trait]] = {}
    for row in CONFLICTS:
        refused.setdefault((row.code, row.why, row.other), []).append(row.one)
    alike: dict[tuple[str, str, tuple[Trait, ...]], list[Trait]] = {}
    for (code, why, other), ones in refused.items():
        alike.setdefault((code, why, tuple(ones)), []).append(other)
    for (code, why, first), others in alike.items():
        lines.append(f"| {_words(first)} | {_words(others)} | {why} | [{code}](rules.md#{code.lower()}) |")
    return "\n".join(lines) + "\n"


def gpu_table() -> str:
    """The catalogue as a table of Markdown."""
    head = ("name", "architecture", "GiB", "bf16", "fp16", "fp8", "TF32", "fp32", "GB/s", "features")
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * 7 + "---|"]
    for key, gpu in GPUS.items():
        rates = [gpu.bf16, gpu.fp16, gpu.fp8, gpu.tf32, gpu.fp32]
        bandwidth = gpu.bandwidth / 1e9 if gpu.bandwidth is not None else None
        numbers = [f"{number:,.6g}" if number is not None else "–" for number in (*rates, bandwidth)]
        bound = "≤ " if "upper bound" in gpu.source else ""
        cells = [f"`{key}`", gpu.architecture, f"{bound}{gpu.memory_bytes / GIB:.2f}", *numbers]
        lines.append(f"| {' | '.join(cells)} | {', '.join(gpu.features) or '–'} |")
    return "\n".join(lines)


def gpus_page() -> str:
    """The catalogue of GPUs."""
    estimated = ", ".join(f"`{name}`" for name, gpu in GPUS.items() if "estimated" in gpu.rates_source)
    return f"""# GPUs

{len(GPUS)} models, by the name that `--gpu` takes; other spellings ("NVIDIA A100-SXM4-80GB") are understood.
What the commonest of them can train: [cards](cards.md).

{gpu_table()}

- **GiB** is what PyTorch reports on such a card where a published message says so. With ≤ it is an upper bound from the
  driver or the data sheet: PyTorch will report a few hundred MiB less.
  "Taken to be that of" another card in the source: a card of the same size and generation.
- **Rates** are dense TFLOP/s with float32 accumulation, from the vendor's data sheet or white paper; figures given
  "with sparsity" are halved, and GeForce cards have half the rate that their box says; most of theirs are computed from
  NVIDIA's core counts and clocks, by the white papers' ratios. Estimated, since no published table was found:
  {estimated}. fp32 is without tensor cores,
  which is what PyTorch uses by default; TF32 is for `torch.set_float32_matmul_precision("high")`.
- A dash: the card cannot, or no figure was found. The features are those of PyTorch's own kernels.
- `--gpu 12GB` plans for a card of which only the memory is known: Ampere, of which PyTorch sees {SEEN_SHARE:.0%}, and
  no speed. That is the share of a T4; most cards show more, so name the card where you know it.
- AMD's cards are here for arithmetic: SureFit is for NVIDIA's CUDA, and nothing has been run on ROCm.
- The source of every figure stands beside it in `src/surefit/facts/gpus.json`.
"""


def errors_page() -> str:
    """Return every error that SureFit raises itself: its code, what it says, and what to do."""
    lines = [
        "# Error codes",
        "",
        "`error[E1002]` in the terminal, `code` with `--json`: a code never changes its meaning.",
        "`…` stands for what the error names: a file, a key, a number. Codes of three letters and three digits are",
        "findings of `surefit check`: [the rules](rules.md).",
        "",
        "| code | the error says | what to do |",
        "|---|---|---|",
    ]
    texts = {
        str(code.value): (_template(call.args[0]), _template(_keyword(call, "help")))
        for path in sorted(SOURCE.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and call.args and isinstance(code := _keyword(call, "code"), ast.Constant)
        if ERROR_CODE.fullmatch(str(code.value))
    }
    lines += [_row(f"`{code}`", *texts[code]) for code in sorted(texts)]
    return "\n".join(lines) + "\n"


def troubleshooting_page() -> str:
    """What other programs print when a run fails, program by program: the text, what it means, what to do."""
    lines = [
        "# Troubleshooting by the error's text",
        "",
        "Search this page for a piece of the message, or let SureFit look through a log:",
        "",
        "```bash",
        'surefit explain "CUDA out of memory"',
        "surefit explain slurm-1234.out",
        "```",
        "",
        "The first error in a log is usually the cause of the rest. These are other programs' messages; SureFit's own",
        "say what to do themselves ([error codes](reference/errors.md)).",
    ]
    errors = known_errors()
    for tool in dict.fromkeys(error.tool for error in errors):
        lines += ["", f"## {tool[0].upper()}{tool[1:]}"]
        for error in (error for error in errors if error.tool == tool):
            lines += ["", f"### {_cell(error.title)}", "", "```text", error.example, "```", "", error.cause, ""]
            lines += [f"- {step}" for step in error.fix]
            if error.rule:
                lines += ["", f"`surefit check` finds one of the causes before the run: `{error.rule}`."]
    return "\n".join(lines) + "\n"


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _template(node: ast.expr | None) -> str:
    """Return a text of the source as it reads, with … for each value that is put into it.

    >>> _template(ast.parse("f'no file {path}' + end if path else 'no file'").body[0].value)
    'no file … / no file'
    """
    match node:
        case None | ast.Constant(value=None):
            return ""
        case ast.Constant(value=text):
            return str(text)
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return re.sub("…+", "…", _template(left) + _template(right))
        case ast.IfExp(body=body, orelse=orelse) | ast.BoolOp(values=[body, orelse]):
            return " / ".join(dict.fromkeys(filter(None, (_template(body), _template(orelse)))))
    return "…"


def built_page() -> str:
    """How the package is built: its layers as the import contract has them, and what each room says it is for."""
    rows = []
    for name in (room for layer in _layers() for room in layer):
        place = SOURCE / name / "__init__.py" if (SOURCE / name).is_dir() else SOURCE / f"{name}.py"
        about = ast.get_docstring(ast.parse(place.read_text()))
        assert about, f"{name} says nothing of itself"
        rows.append(f"| `{name}` | {' '.join(about.partition(chr(10) * 2)[0].split())} |")
    return BUILT.format(rows="\n".join(rows))


def _layers() -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [layer.replace(" ", "").split("|") for layer in contracts[0]["layers"]]


def house_picture() -> str:
    """The rooms in their layers, and an arc for every room that imports another."""
    layers = _layers()
    height_of = {room: 66 + 40 * number for number, layer in enumerate(layers) for room in layer}
    lines = []
    for room, y in height_of.items():
        for other in sorted(_imported_by(room) & set(height_of) - {room}):
            side, reach = (470, 1) if height_of[other] - y > 40 else (250, -1)
            bow = side + reach * (20 + (height_of[other] - y) * 0.28)
            path = f"M{side} {y} C{bow:.0f} {y} {bow:.0f} {height_of[other]} {side} {height_of[other]}"
            lines.append(f'<path d="{path}" fill="none" stroke="#0072b2" stroke-opacity="0.25"/>')
    for number, layer in enumerate(layers):
        y = 66 + 40 * number
        lines.append(f'<rect x="250" y="{y - 15}" width="220" height="30" rx="4" fill="#eef4f8" stroke="#0072b2"/>')
        lines.append(f'<text x="360" y="{y + 4}" text-anchor="middle">{" · ".join(layer)}</text>')
    return document("SureFit's rooms, and who imports whom", 66 + 40 * len(layers), lines)


def _imported_by(room: str) -> set[str]:
    files = (SOURCE / room).rglob("*.py") if (SOURCE / room).is_dir() else [SOURCE / f"{room}.py"]
    found: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module == "surefit":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surefit."):
            found.add(str(node.module).split(".")[1])
    return found


BUILT = """# How SureFit is built

| you want to | read |
|---|---|
| find the file that does something | [The rooms](#the-rooms) |
| know what may import what | [Imports run one way](#imports-run-one-way) |
| add a rule, a recipe, an optimizer, a parallel mode | `CONTRIBUTING.md` in the repository |
| know why something is as it is | the decision records beside this page, and docs/LOG.md in the repository |

A run goes through six stages, which communicate through files in the run directory, never through globals:
`check → plan → train → merge → evaluate → report`. `stages/` has them as functions; `cli/` shows what they return,
`api.py` returns it to Python, `ui/` draws it in a browser. The one training step is in `train/step.py`: training runs
it, the dry pass runs it on the worst batch, `plan` runs it on tensors without data.

## Imports run one way

A file imports from its own room and from the lines below it, never from a neighbour on its line; `lint-imports`
enforces this. This picture and the table are written by `make reference` from that contract and from the files.

![The rooms, and who imports whom](assets/house.svg)

## The rooms

| room | what it is for |
|---|---|
{rows}

`python scripts/house.py` prints more about the shape of the code: length of functions, what an addition touches,
names that nothing calls. `tests/arch` enforces the limits.
"""
_OFFLOADED = {"optimizer state": "optimizer state", "weights": "weights and optimizer state"}


def _words(names: Iterable[Trait]) -> str:
    return ", ".join(f"`{name}`" if name.islower() and name.isidentifier() else name for name in names)


PAGES = {
    "config.md": config_page,
    "rules.md": rules_page,
    "combinations.md": combinations_page,
    "gpus.md": gpus_page,
    "errors.md": errors_page,
    "../troubleshooting.md": troubleshooting_page,
    "../built.md": built_page,
    "../assets/house.svg": house_picture,
}


def main() -> None:
    for name, page in PAGES.items():
        write_atomic(OUTPUT / name, page())


if __name__ == "__main__":
    main()
