"""Scripts that are no use, values that are and are not written out, and that nothing is guessed."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.conftest import call
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import ConfigError
from surefit.importers import find_tool, read_tool_config
from surefit.importers.python_source import COMPUTED, parse_script
from surefit.lint.engine import run_rules
from surefit.lint.rule import Finding, LintContext
from surefit.nano import PATH as NANO

SOUND = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorForSeq2Seq
from trl import SFTConfig, SFTTrainer

quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
model = AutoModelForCausalLM.from_pretrained(
    "org/model", quantization_config=quantization, torch_dtype="bfloat16", device_map="auto", max_memory={0: "20GiB"}
)
arguments = SFTConfig(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=4,
    max_steps=400, learning_rate=2e-4, warmup_steps=10, eval_strategy="steps", eval_steps=50, save_strategy="steps",
    save_steps=100, save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", bf16=True,
    fp16=False, max_length=1024, packing=False, optim="adamw_torch", lr_scheduler_type="cosine", report_to="none",
)
lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], use_dora=False)
trainer = SFTTrainer(model=model, args=arguments, eval_dataset=held_out, peft_config=lora)
trainer.train()
"""
COMPUTING = (
    "args.value",
    "os.environ['VALUE']",
    "choose()",
    "f'{name}'",
    "values[i]",
    "a if b else c",
    "[x for x in y]",
)
SLOTS = [
    (node.lineno, node.col_offset, node.end_col_offset)
    for call in ast.walk(ast.parse(SOUND))
    if isinstance(call, ast.Call)
    for node in (*call.args, *(keyword.value for keyword in call.keywords))
    if not isinstance(node, ast.Name)
]
"""Where each value of the sound script stands."""


def written(tmp_path: Path, text: str | bytes, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def judged(path: Path) -> list[Finding]:
    found = read_tool_config(path)
    return run_rules(LintContext(None, path, setup=found.setup, problems=found.problems)).findings


def computed(chosen: dict[int, str]) -> str:
    """The sound script with some of its values computed."""
    lines = SOUND.splitlines()
    for slot in sorted(chosen, reverse=True):
        line, start, end = SLOTS[slot]
        lines[line - 1] = lines[line - 1][:start] + chosen[slot] + lines[line - 1][end:]
    return "\n".join(lines)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, len(SLOTS) - 1), st.sampled_from(COMPUTING)))
def test_what_is_computed_is_never_an_error(tmp_path: Path, chosen: dict[int, str]) -> None:
    assert judged(written(tmp_path, computed(chosen))) == []


def test_everything_computed(tmp_path: Path) -> None:
    found = read_tool_config(written(tmp_path, computed(dict.fromkeys(range(len(SLOTS)), "args.value"))))
    assert {one.why for one in found.lost} == {"it is computed when the script runs"}
    said = {name for name, value in vars(found.setup).items() if value not in (None, (), {})}
    assert said == {"tool"}


def test_it_is_never_run(tmp_path: Path) -> None:
    path = written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n{SOUND}")
    assert judged(path) == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("from trl import SFTConfig\nSFTConfig(max_length=1 2)\n", 2, "not valid Python"),
        ("x = 1\nprint 'hello'\n", 2, "not valid Python"),
        ("if x:\n", 1, "not valid Python"),
        (b"x = 1\n\0\n", 2, "null bytes"),
        (b"x = 1\ny = '\xff\xfe'\n", 2, "not utf-8 text"),
        (b"# -*- coding: nonsense -*-\nx = 1\n", 1, "cannot be decoded"),
        ("(" * 300 + ")" * 300, 1, "not valid Python"),
        ("x = " + "-" * 100_000 + "1\n", None, "nested too deeply"),
        ("x = 1\n" * 400_000, None, "larger than 2 MiB"),
        ("import os\nprint(os.getcwd())\n", None, "without a call that trains"),
        ("", None, "without a call that trains"),
        ("class TrainingArguments: ...\nTrainingArguments(max_lenght=3)\n", None, "without a call that trains"),
    ],
)
def test_what_is_no_training_script(tmp_path: Path, text: str | bytes, line: int | None, words: str) -> None:
    path = written(tmp_path, text)
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    assert result.exit_code == 2
    assert words in answer["message"]
    assert (answer["path"], answer["line"]) == (str(path), line)


def test_a_directory_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name in ("folder.py", "nothing.py"):
        assert CliRunner().invoke(app, ["check", str(tmp_path / name)]).exit_code == 2


def test_another_encoding_that_the_script_names(tmp_path: Path) -> None:
    text = f"# -*- coding: latin-1 -*-\nname = 'é'\n{SOUND}".encode("latin-1")
    assert judged(written(tmp_path, text)) == []
    assert find_tool(written(tmp_path, text)) == "python"


def value_of(tmp_path: Path, text: str) -> object:
    """The value of `it`, or COMPUTED."""
    source = parse_script(written(tmp_path, text))
    return source.value(ast.parse("it", mode="eval").body, source.module)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it = 2e-4", 2e-4),
        ("it = -1", -1),
        ("it = 16 // 4 * 1024", 4096),
        ("it = 1 / 0", COMPUTED),
        (f"it = 0x{'f' * 6_000}", COMPUTED),
        ("it = 10 ** 10 ** 10", COMPUTED),
        ("import torch\nit = torch.bfloat16", "bfloat16"),
        ("it = torch.bfloat16", COMPUTED),
        ("SIZE = 3\nit = [SIZE, 4]", [3, 4]),
        ("it = ['q_proj', other]", COMPUTED),
        ("SETTINGS = {'r': 8}\nit = SETTINGS['r']", 8),
        ("SETTINGS = {'r': 8}\nSETTINGS['r'] = 9\nit = SETTINGS['r']", COMPUTED),
        ("SETTINGS = {'r': 8}\nSETTINGS.update(r=9)\nit = SETTINGS['r']", COMPUTED),
        ("class C:\n    r = 8\nit = C.r", 8),
        ("class C:\n    r = 8\nC.r = 9\nit = C.r", COMPUTED),
        ("class C:\n    r = 8\nc = C()\nit = c.r", 8),
        ("it = 1\nit = 2", COMPUTED),
        ("it = 1\nit += 2", COMPUTED),
        ("if x:\n    it = 1\nelse:\n    it = 2", COMPUTED),
        ("for it in range(3):\n    pass", COMPUTED),
        ("def f():\n    global it\n    it = 2\nit = 1", COMPUTED),
        ("it = it2\nit2 = it", COMPUTED),
        ("a, it = 1, 2", 2),
        ("a, it = f()", COMPUTED),
        ("it = 5,", COMPUTED),
        ("it = (5,)", (5,)),
        ("it: int = 7", 7),
        ("with open(x) as it:\n    pass", COMPUTED),
        ("(it := 3)", COMPUTED),
    ],
)
def test_which_names_stand_for_a_value(tmp_path: Path, text: str, value: object) -> None:
    assert value_of(tmp_path, text) == value


def test_settings_in_a_dictionary_are_named_where_they_stand(tmp_path: Path) -> None:
    text = "from peft import LoraConfig\n\nLORA = {\n    'r': 8,\n    'dropout': 0.05,\n}\nlora = LoraConfig(**LORA)\n"
    (one,) = judged(written(tmp_path, text))
    assert (one.code, one.line) == ("ARG002", 5)


def test_arguments_from_somewhere_else_leave_the_rest_open(tmp_path: Path) -> None:
    """`**more` may hold the eval_strategy that eval_steps needs, or a save_total_limit."""
    text = "from transformers import TrainingArguments\n\nTrainingArguments('out', ARGUMENTS)\n"
    plain = judged(written(tmp_path, text.replace("ARGUMENTS", "eval_steps=10, save_steps=2, max_steps=400")))
    assert {one.code for one in plain} == {"ARG003", "CKP002"}
    given = text.replace("ARGUMENTS", "eval_steps=10, save_steps=2, max_steps=400, **more")
    assert judged(written(tmp_path, given)) == []


def test_several_calls_are_each_judged_by_their_own(tmp_path: Path) -> None:
    text = """\
from transformers import TrainingArguments
first = TrainingArguments("a", max_steps=50, no_cuda=True)
second = TrainingArguments("b", warmup_steps=100, no_cuda=False)
"""
    assert [(one.code, one.line) for one in judged(written(tmp_path, text))] == [("ARG001", 2), ("ARG001", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "from .args import TrainingArguments\nfrom trl import SFTConfig\nTrainingArguments(lr=3)\nSFTConfig()\n",
        "import transformers\nfrom trl import SFTConfig\nfrom dataclasses import dataclass\n\n@dataclass\n"
        "class TrainingArguments(transformers.TrainingArguments):\n    own: int = 3\n\n"
        "TrainingArguments(own=3)\nSFTConfig()\n",
        "try:\n    from transformers import AdamW\nexcept ImportError:\n    from torch.optim import AdamW\n"
        "from trl import SFTConfig\nSFTConfig()\n",
    ],
)
def test_a_name_of_its_own_is_not_the_library_s(tmp_path: Path, text: str) -> None:
    assert judged(written(tmp_path, text)) == []


def test_masks_of_padding_are_no_masks_of_the_prompt(tmp_path: Path) -> None:
    text = """\
from transformers import DataCollatorForLanguageModeling, Trainer

def tokenize(row):
    tokens = tokenizer(row["text"])
    labels = tokens["input_ids"].clone()
    labels[labels == tokenizer.pad_token_id] = -100
    tokens["labels"] = labels + [-100] * 3
    return tokens

rows = rows.map(tokenize)
Trainer(model=model, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
"""
    assert judged(written(tmp_path, text)) == []


def test_checking_a_script_imports_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path, SOUND)
    code = (
        "import sys; from surefit.importers import read_tool_config; from pathlib import Path; "
        f"read_tool_config(Path({str(path)!r}))"
    )
    asked = f"{code}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'peft', 'trl')))"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_an_import_needs_a_config(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(written(tmp_path, SOUND))])
    assert result.exit_code == 2
    assert "describes no whole run that SureFit trains" in result.output


def test_requirements_that_are_none(tmp_path: Path) -> None:
    for name, text, line in (
        ("requirements.txt", "# nothing\n", None),
        ("pyproject.toml", "[project\n", 1),
        ("pyproject.toml", "[tool.ruff]\nline-length = 100\n", None),
        ("pyproject.toml", f"[project]\nx = {'9' * 6_000}\n", None),
        ("requirements.txt", f"numpy=={'9' * 6_000}\n", None),
        ("pyproject.toml", f"[tool.poetry.dependencies]\ntorch = '^{'9' * 6_000}'\n", None),
        ("environment.yml", f"name: x\ndependencies: [numpy={'9' * 6_000}]\n", None),
        ("environment.yml", "name: x\nchannels: [a]\ndependencies: []\n", None),
    ):
        with pytest.raises(ConfigError) as caught:
            read_tool_config(written(tmp_path, text, name))
        assert caught.value.line == line, text
    found = read_tool_config(
        written(
            tmp_path, "numpy >= \nscipy=1.2\n-e .\n./own.whl\ntorch==2.9.0 ; python_version > '3'\n", "requirements.txt"
        )
    )
    assert [problem.line for problem in found.problems] == [1, 2]
    assert [one.line for one in found.lost] == [3, 4]


PADDED = """from transformers import AutoModelForCausalLM, AutoTokenizer, COLLATOR, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("base")
tokenizer = AutoTokenizer.from_pretrained("base")
arguments = TrainingArguments(output_dir="out", num_train_epochs=1)
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=COLLATOR(tokenizer)).train()
"""


@pytest.mark.parametrize(
    ("pad", "collator", "found"),
    [
        ("<|end|>", "DataCollatorForLanguageModeling", "TPL003"),
        ("<|pad|>", "DataCollatorForLanguageModeling", None),
        (None, "DataCollatorForSeq2Seq", "TPL004"),
        ("<|pad|>", "DataCollatorForSeq2Seq", None),
    ],
)
def test_the_collator_is_judged_beside_the_tokenizer_that_is_here(
    pad: str | None, collator: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(NANO, tmp_path / "base")
    tokenizer = tmp_path / "base" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"pad_token": pad}))
    Path("train.py").write_text(PADDED.replace("COLLATOR", collator))
    answer = call("check", "train.py", "--json")
    told = {(each["code"], each["line"]) for each in answer.json["findings"] if each["code"].startswith("TPL")}
    assert told == ({(found, 6)} if found else set())


def test_an_entry_with_a_stray_comma_is_no_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{SOUND}sizes = {{}}\nsizes[0] = 5,\nif len(sizes) < 4:\n    trainer.save_model()\n")
    assert [problem.code for problem in read_tool_config(script).problems] == []
    script.write_text(f"{SOUND}size = 5,\nif size < 4:\n    trainer.save_model()\n")
    assert [(problem.code, problem.field) for problem in read_tool_config(script).problems] == [("E3018", "size")]
