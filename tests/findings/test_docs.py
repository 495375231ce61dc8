"""What the documentation and the runtime's own texts promise: copying, installing, importing, starters."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from surefit import recipes
from surefit.cli.app import app
from surefit.config.starter import has_bundled_rows, starter_config
from surefit.core.packaging import install_extra

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
HISTORY = ("LOG.md",)
"""Pages that record what was, and are not rewritten."""
REFERENCE = runpy.run_path(str(ROOT / "scripts/reference.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STYLE = ROOT / "docs/stylesheets/extra.css"


@pytest.mark.parametrize("page", ["config.md", "rules.md"], ids=["RF3-config", "RF3-rules"])
def test_every_line_of_a_table_has_its_cells(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs/reference" / page).read_text(), flags=re.DOTALL)
    wide = 4 if page == "config.md" else 3
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows
    assert [line for line in rows if len(re.findall(r"(?<!\\)\|", line)) != wide + 1] == []


def test_no_cell_of_the_config_reference_is_taken_for_html_or_says_a_number_in_full() -> None:
    page = REFERENCE["config_page"]()
    prose = re.sub(r"`[^`]*`", "", page)
    assert "&lt;call&gt;" in prose
    assert re.findall(r"<[a-z/!][^>]*>", prose) == []
    assert re.findall(r"\d(?:,\d{3}){5,}", page) == []


@pytest.mark.parametrize(
    ("key", "takes"),
    [
        ("mix", "a mapping of names to a number (above 0, at most 1,000,000)"),
        ("extra_sets", "a mapping of names to text"),
        ("target_modules", "'all-linear' or a list of strings"), ("max_grad_norm", "a number (above 0, at most 1e+30)"),
    ],
    ids=["RF3-mix", "RF3-extra", "RF3-list", "RF3-giant"],
)  # fmt: skip
def test_what_a_key_takes(key: str, takes: str) -> None:
    assert f"| `{key}` | {takes} |" in REFERENCE["config_page"]()


def test_cells_of_a_row() -> None:
    row = REFERENCE["_row"]("`a|b`", "x | y", "one\n  two <three> `<four>`")
    assert row == "| `a\\|b` | x \\| y | one two &lt;three&gt; `<four>` |"


def consoles() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [(page.name, block) for block in blocks]
    return found


def test_what_the_site_copies_of_a_console_are_its_commands() -> None:
    """RF4. The theme copies what is shown of a block marked data-md-copying; the style hides prompts and output."""
    pygments = pytest.importorskip("pygments", reason="pygments is not installed")
    from pygments.lexers import get_lexer_by_name
    from pygments.token import Generic

    hidden = [name for name in ("gp", "go") if f"code[data-md-copying] .{name}" in STYLE.read_text()]
    assert hidden == ["gp", "go"], pygments.__version__
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    assert config["project"]["extra_css"] == [str(STYLE.relative_to(ROOT / "docs"))]
    for page, block in consoles():
        tokens = list(get_lexer_by_name("console").get_tokens(block))
        copied = "".join(text for kind, text in tokens if kind not in (Generic.Prompt, Generic.Output))
        lines = [line for line in copied.splitlines() if line.strip()]
        commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        assert commands, f"{page}: a block without a command is text"
        assert [line for line in lines if line.startswith("$")] == [], page
        assert lines[0].strip() == commands[0].strip(), page
        assert len(lines) >= len(commands), page


def test_the_theme_still_copies_what_is_shown() -> None:
    spec = find_spec("zensical")
    if spec is None or spec.origin is None:
        pytest.skip("zensical is not installed")
    scripts = Path(spec.origin).parent.glob("templates/assets/javascripts/bundle.*.js")
    assert any(re.search(r'"data-md-copying".{0,120}innerText', script.read_text()) for script in scripts)


def test_the_readme_is_copied_on_other_sites_so_that_its_commands_have_no_prompt() -> None:
    assert [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("$ ")] == []


@pytest.mark.browser
def test_a_click_on_the_copy_button(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium, spec = Path("/usr/bin/chromium"), find_spec("zensical")
    if not chromium.exists() or spec is None:
        pytest.skip("chromium or zensical is not installed")
    import subprocess
    import sys

    (tmp_path / "docs/stylesheets").mkdir(parents=True)
    (tmp_path / "docs/stylesheets/extra.css").write_bytes(STYLE.read_bytes())
    example = "$ surefit check run.yaml \\\n    --show 3\nrun.yaml: 0 errors\n$ surefit run run.yaml\n"
    page = f"# A page\n\n```console\n{example}```\n"
    (tmp_path / "docs/index.md").write_text(page)
    text = (ROOT / "zensical.toml").read_text()
    (tmp_path / "zensical.toml").write_text(re.sub(r"nav = \[.*?^\]\n", "", text, flags=re.DOTALL | re.MULTILINE))
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=tmp_path, check=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        shown = browser.new_page()
        shown.goto((tmp_path / "site/index.html").as_uri())
        # What the theme's button reads: bundle.js sets the attribute, takes innerText and removes it.
        copied = shown.evaluate(
            "() => { const code = document.querySelector('.highlight code'); code.setAttribute('data-md-copying', '');"
            " return code.innerText }"
        )
        browser.close()
    lines = [line for line in copied.splitlines() if line.strip()]
    assert lines == ["surefit check run.yaml \\", "    --show 3", "surefit run run.yaml"]


@pytest.mark.parametrize(
    "folder", ["src", "docs", "configs", "examples", "deploy", "."], ids=lambda name: f"RF5-{name}"
)
def test_no_text_installs_a_package_of_our_name_from_an_index(folder: str) -> None:
    """Nobody has published one: whoever registers the name would be installed."""
    places = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")] if folder == "." else [
        path for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".j2", ".toml", ".sh", ".ipynb", ".json", ".js", ".txt")
    ]  # fmt: skip
    wrong = re.compile(
        r"(pip3?|uv|pipx|poetry|conda) +(pip +)?(install|add)\b[^\n`]*?['\" ]surefit\b(?!/)|['\"]surefit\["
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in places
        if path.name not in HISTORY and path.is_file()
        for match in wrong.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_the_command_for_an_extra_names_one_that_there_is() -> None:
    used = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"""install_extra\(["'](\w+)["']""", path.read_text())
    }
    assert used >= {"quant", "kernels", "scale", "ui", "deepspeed", "constrained"}
    assert used <= set(PROJECT["optional-dependencies"])
    assert "-c constraints.txt '.[ui]'" in install_extra("ui")
    assert (ROOT / "constraints.txt").is_file()


def test_the_table_of_extras_is_complete() -> None:
    text = (ROOT / "docs/install.md").read_text()
    table = text[text.index("| extra |") :].partition("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(PROJECT["optional-dependencies"])


FOREIGN = {
    "axolotl.yaml": "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - {path: rows.jsonl, type: alpaca}\n",
    "llamafactory.yaml": "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\ndo_train: true\ndataset: alpaca_en_demo\n"
    "template: qwen\nfinetuning_type: lora\noutput_dir: out\n",
    "trl.yaml": "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\noutput_dir: out\n",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n",
    "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "gpt2"}),
    "ds_config.json": json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}),
    "job.sbatch": "#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n",
}


@pytest.mark.parametrize("name", FOREIGN, ids=lambda name: f"RF6-{name}")
def test_import_makes_a_config_of_what_the_readme_says(name: str) -> None:
    Path(name).write_text(FOREIGN[name])
    done = CliRunner().invoke(app, ["import", name, "-o", "new.yaml"])
    whole = name in ("axolotl.yaml", "llamafactory.yaml", "trl.yaml")
    assert (done.exit_code, Path("new.yaml").exists()) == ((0, True) if whole else (2, False)), done.output


@pytest.mark.parametrize("recipe", recipes.list_recipes(), ids=lambda name: f"RF7-{name}")
def test_a_starter_runs_as_it_is_or_says_what_to_name_first(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("run.yaml").write_text(starter_config(recipe))
    done = CliRunner().invoke(app, ["check", "run.yaml", "--json"])
    findings = json.loads(done.stdout.strip().splitlines()[-1])["findings"]
    errors = {(each["code"], each["field"]) for each in findings if each["severity"] == "error"}
    rows: Any = yaml.safe_load(starter_config(recipe))["data"]["train"]
    assert has_bundled_rows(recipe) == rows.startswith("surefit/")
    assert (("DAT001", "data.train") in errors) == (not has_bundled_rows(recipe))
    assert has_bundled_rows(recipe) <= (errors == set())


def test_the_page_tells_them_apart(tmp_path: Path) -> None:
    template = (ROOT / "src/surefit/ui/templates/config.html.j2").read_text()
    assert "starters(complete)" in template
    assert "starters(own_rows)" in template
