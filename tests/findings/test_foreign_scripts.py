"""Other tools' scripts, launch lines and requirements, as users have them, read together with the files beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.importers.releases import NEWEST, TargetReleases

CASES = Path(__file__).parents[3] / "shared/cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not on this machine")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / ".git").mkdir()  # nothing above belongs to the project


def check(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(code, field) → finding of `surefit check NAME`."""
    result = CliRunner().invoke(app, ["check", name, "--json"])
    report = json.loads(result.stdout.strip().splitlines()[-1])
    return {(each["code"], each["field"]): each for each in report["findings"]}


def codes(name: str) -> set[tuple[str, str]]:
    return set(check(name))


def write(**files: str) -> None:
    """Write files; an underscore pair stands for the dot of a name."""
    for name, text in files.items():
        path = Path(name.replace("__", ".").replace("_in_", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def copied(folder: str) -> None:
    shutil.copytree(CASES / folder, ".", dirs_exist_ok=True)
    for path in Path().rglob("*"):
        path.chmod(0o755)


TRAINER = """from transformers import Trainer, TrainingArguments
args = TrainingArguments(output_dir="o", {arguments})
Trainer(model=model, {trainer}, args=args, train_dataset=ds, eval_dataset=held_out).train()
"""


@needs_cases
@pytest.mark.parametrize("finding", ["FA1"])
def test_unsloth_takes_the_old_arguments(finding: str) -> None:
    copied("foreign/t")
    shutil.rmtree("pin")
    assert {code for code, _ in codes("u.py")} & {"ARG001", "ARG002", "ARG005"} == set()


@pytest.mark.parametrize("finding", ["FA1"])
def test_unsloth_drops_what_its_trl_no_longer_has(finding: str) -> None:
    write(
        train__py="""from unsloth import FastLanguageModel
from trl import GRPOConfig, SFTConfig
a = GRPOConfig(max_prompt_length=512, use_liger_loss=True, lerning_rate=1e-5)
b = SFTConfig(max_seq_length=512, warmup_ratio=0.1)
"""
    )
    found = codes("train.py")
    assert ("ARG003", "max_prompt_length") in found
    assert ("ARG005", "use_liger_loss") in found
    assert ("ARG004", "lerning_rate") in found
    assert not {code for code, _ in found} & {"ARG001", "ARG002"}


@pytest.mark.parametrize(
    ("finding", "requirements", "expected"),
    [
        ("FA2", "transformers==4.51.3", "ARG005"),
        ("FA2", "transformers>=4.46.0,<5", "ARG005"),
        ("FA2", "transformers==4.45.2", None),
        ("FA2", "transformers>=4.40", "ARG001"),
        ("FA2", "", "ARG001"),
        ("FA6", "transformers=4.51.3=pypi_0", "ARG005"),
        ("FA6", "transformers=4.40.1=pypi_0", None),
    ],
)
def test_the_pinned_release_decides(finding: str, requirements: str, expected: str | None) -> None:
    write(train__py=TRAINER.format(arguments="", trainer="tokenizer=tok"))
    if requirements:
        write(requirements__txt=f"{requirements}\n")
    assert {code for code, field in codes("train.py") if field == "tokenizer"} == ({expected} if expected else set())


@pytest.mark.parametrize("finding", ["FA2"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("environment.yml", "name: x\ndependencies:\n  - python=3.11\n  - pip:\n    - transformers==4.51.3\n"),
        ("pyproject.toml", '[project]\nname = "x"\nversion = "1"\ndependencies = ["transformers==4.51.3"]\n'),
        ("uv.lock", '[[package]]\nname = "transformers"\nversion = "4.51.3"\n'),
        ("setup.sh", "#!/bin/bash\nV=4.51.3\npip install -q transformers==$V accelerate\n"),
        ("Dockerfile", "FROM python\nRUN pip install --no-cache-dir transformers==4.51.3\n"),
        ("conda_env.txt", "# $ conda create --name <env> --file <this file>\ntransformers=4.51.3=pypi_0\n"),
        ("requirements/train.txt", "transformers==4.51.3\n"),
    ],
)
def test_pins_are_found_wherever_a_project_keeps_them(finding: str, name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    write(train__py=TRAINER.format(arguments="", trainer="tokenizer=tok"))
    assert ("ARG005", "tokenizer") in codes("train.py")


@pytest.mark.parametrize("finding", ["FA2"])
def test_an_argument_of_a_later_release(finding: str) -> None:
    write(
        train__py=TRAINER.format(arguments='eval_strategy="steps"', trainer="callbacks=[]"),
        requirements__txt="transformers==4.40.2\n",
    )
    assert check("train.py")["CFG004", "eval_strategy"]["error"] == "E3500"


@pytest.mark.parametrize(
    ("finding", "asked", "name", "key", "verdict"),
    [
        ("FA2", {}, "TrainingArguments", "warmup_ratio", "gone"),
        ("FA2", {"transformers": "<5.12"}, "TrainingArguments", "warmup_ratio", "deprecated"),
        ("FA2", {"transformers": "==4.57.1"}, "TrainingArguments", "warmup_ratio", "taken"),
        ("FA2", {"transformers": "==4.50.0"}, "TrainingArguments", "evaluation_strategy", "deprecated"),
        ("FA2", {"transformers": "==4.51.0"}, "TrainingArguments", "evaluation_strategy", "gone"),
        ("FA2", {"trl": "==0.12.2"}, "SFTTrainer", "max_seq_length", "deprecated"),
        ("FA2", {"trl": "==0.13.0"}, "SFTTrainer", "max_seq_length", "gone"),
        ("FA2", {"trl": "==0.19.1"}, "SFTConfig", "max_seq_length", "deprecated"),
        ("FA2", {"trl": "==0.20.0"}, "SFTConfig", "max_seq_length", "gone"),
        ("PR1", {"trl": "==0.28.0"}, "DPOConfig", "max_prompt_length", "deprecated"),
        ("PR1", {"trl": "==0.29.0"}, "DPOConfig", "max_prompt_length", "gone"),
        ("PR1", {"transformers": "==4.40.2"}, "DPOConfig", "max_prompt_length", "deprecated"),
    ],
)
def test_the_table_of_releases(finding: str, asked: dict[str, str], name: str, key: str, verdict: str) -> None:
    assert TargetReleases(asked, {}).takes(name, key) == verdict


@pytest.mark.parametrize("finding", ["PR1"])
def test_the_newest_releases_in_the_table_are_the_installed_ones(finding: str) -> None:
    dataclasses = pytest.importorskip("dataclasses")
    trl = pytest.importorskip("trl")
    if ".".join(trl.__version__.split(".")[:2]) != NEWEST.release("trl"):
        pytest.skip("another TRL is installed")
    for name in ("DPOConfig", "KTOConfig", "GRPOConfig", "RewardConfig", "SFTConfig"):
        fields = {field.name for field in dataclasses.fields(getattr(trl, name)) if field.init}
        taken = {*NEWEST.keys(name, "taken", "deprecated"), *NEWEST.keys("TrainingArguments", "taken", "deprecated")}
        assert fields == taken


@needs_cases
@pytest.mark.parametrize("finding", ["PR1"])
def test_a_dpo_config_is_judged_by_its_own_signature(finding: str) -> None:
    copied("foreign/preferences")
    removed = {("ARG001", "max_prompt_length"), ("ARG001", "rpo_alpha")}
    assert codes("py_dpo.py") == removed | {("ARG003", "padding_free")}  # trl#7014: it does nothing
    write(requirements__txt="trl==0.24.0\n")
    assert codes("py_dpo.py") == {("CFG004", "use_liger_kernel")} or not {
        code for code, _ in codes("py_dpo.py") if code == "ARG001"
    }


@needs_cases
@pytest.mark.parametrize("finding", ["FA6"])
def test_a_conda_list_is_read(finding: str) -> None:
    copied("foreign/t/we")
    assert codes("requirements.txt") == set()


@needs_cases
@pytest.mark.parametrize("finding", ["FA8"])
def test_bf16_on_a_v100_is_a_warning(finding: str) -> None:
    copied("foreign/t/we")
    assert {key[0]: each["severity"] for key, each in check("v100.sh").items()} == {"SLM015": "warning"}


@needs_cases
@pytest.mark.parametrize(
    ("finding", "name", "expected"),
    [
        ("FB1", "a.py", {"MOD008", "SCH003"}),
        ("FB1", "b.py", {"MOD008", "SCH003"}),
        ("FB6", "srun_lf.sh", {"SLM003"}),
        ("FB15", "srun_py.sh", {"SLM002"}),
    ],
)
def test_what_was_not_seen(finding: str, name: str, expected: set[str]) -> None:
    copied("foreign/t")
    assert expected <= {code for code, _ in codes(name)}


@needs_cases
@pytest.mark.parametrize("finding", ["FB2"])
def test_evaluation_without_rows(finding: str) -> None:
    copied("foreign/t")
    assert {check(name)["CFG004", "eval_strategy"]["error"] for name in ("a.py", "b.py")} == {"E3501"}


@pytest.mark.parametrize("finding", ["FB2"])
@pytest.mark.parametrize("given", ["eval_dataset=held_out", "**more", "eval_dataset=held_out if args.eval else None"])
def test_evaluation_that_may_have_rows(finding: str, given: str) -> None:
    write(
        train__py=f"""from trl import SFTConfig, SFTTrainer
SFTTrainer(model=m, args=SFTConfig("o", eval_strategy="steps", eval_steps=5), train_dataset=ds, {given}).train()
"""
    )
    assert codes("train.py") == set()


TOKENS = """from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("org/model")
tokenizer.pad_token = tokenizer.{token}
collator = {collator}
Trainer(model=m, args=TrainingArguments("o"), train_dataset=ds, data_collator=collator).train()
"""


@pytest.mark.parametrize(
    ("finding", "token", "collator", "said"),
    [
        ("FB10", "eos_token", "DataCollatorForLanguageModeling(tokenizer, mlm=False)", True),
        ("FB10", "unk_token", "DataCollatorForLanguageModeling(tokenizer, mlm=False)", False),
        ("FB10", "eos_token", "DataCollatorForSeq2Seq(tokenizer)", False),
    ],
)
def test_padding_with_the_end(finding: str, token: str, collator: str, said: bool) -> None:
    write(
        train__py=TOKENS.format(token=token, collator=collator).replace(
            "Collator,", "Collator, DataCollatorForSeq2Seq,"
        )
    )
    assert (("TPL025", "pad_token") in codes("train.py")) is said


@pytest.mark.parametrize(("finding", "pin", "said"), [("FB10", "trl==0.9.6", True), ("FB10", "trl==0.20.0", False)])
def test_the_collator_that_an_old_sfttrainer_makes(finding: str, pin: str, said: bool) -> None:
    write(
        requirements__txt=f"{pin}\n",
        train__py="""from trl import SFTConfig, SFTTrainer
tokenizer.pad_token = tokenizer.eos_token
SFTTrainer(model=m, args=SFTConfig("o"), train_dataset=ds).train()
""",
    )
    assert (("TPL025", "pad_token") in codes("train.py")) is said


@needs_cases
@pytest.mark.parametrize("finding", ["FB12"])
def test_a_quantization_that_cannot_be(finding: str) -> None:
    copied("foreign/t")
    found = check("c.py")
    assert found["CFG004", "load_in_8bit"]["error"] == "E3502"
    assert found["CFG004", "bnb_4bit_quant_type"]["error"] == "E3503"
    assert ("ARG003", "load_best_model_at_end") in found


@pytest.mark.parametrize("finding", ["FB13"])
@pytest.mark.parametrize(("user", "answer"), [("<|im_start|>user", "<|im_start|>assistant"), ("[INST]", "[/INST]")])
def test_labels_over_turns_written_by_hand(finding: str, user: str, answer: str) -> None:
    write(
        train__py=f"""from transformers import Trainer, TrainingArguments
def encode(row):
    text = f"{user}{{row['question']}}{answer}{{row['answer']}}"
    ids = tokenizer(text, truncation=True, max_length=512)
    ids["labels"] = ids["input_ids"].copy()
    return ids
Trainer(model=m, args=TrainingArguments("o"), train_dataset=ds.map(encode)).train()
"""
    )
    assert ("LAB001", "labels") in codes("train.py")


@pytest.mark.parametrize(
    ("finding", "text", "expected"),
    [
        ("FB17", "trl==0.12.2\ntransformers==4.43.3\n", ("STK005", "transformers")),
        ("FB17", "transformers==4.51.3\ntokenizers==0.19.1\n", ("STK005", "tokenizers")),
        ("FB17", "transfomers==4.51.3\n", ("STK029", "transfomers")),
        ("FB17", "trl==0.12.2\ntransformers==4.46.3\n", None),
        ("FB17", "dataset==1.6.2\npytorch-lightning\n", None),
    ],
)
def test_pins_that_cannot_work(finding: str, text: str, expected: tuple[str, str] | None) -> None:
    write(requirements__txt=text)
    assert {key for key in codes("requirements.txt") if key[0].startswith("STK")} == ({expected} if expected else set())


@needs_cases
@pytest.mark.parametrize(
    ("finding", "name", "expected"),
    [
        ("TA6-1", "train_ranker2.py", {"BAT005", "PAR002"}),
        ("TA6-1", "train_ranker.py", {"BAT005", "PAR002"}),
        ("TA6-1", "launch.sh", {"PAR002"}),
        ("TA6-5", "setup.sh", {"SLM029", "PAR002"}),
    ],
)
def test_the_files_of_team_1(finding: str, name: str, expected: set[str]) -> None:
    copied("teams/t1")
    found = check(name)
    assert expected <= {code for code, _ in found}
    spread = next(each for (code, _), each in found.items() if code == "PAR002")
    assert Path(spread["path"]).name.startswith("train_ranker")
    assert "2 processes" in spread["message"]


@needs_cases
@pytest.mark.parametrize("finding", ["TA6-2"])
def test_the_setup_of_team_2(finding: str) -> None:
    copied("teams/t2")
    assert {("STK004", "torchvision"), ("STK016", "flash-attn")} <= codes("golden_dynamic_setup_auto.sh")


@needs_cases
@pytest.mark.parametrize("finding", ["TA6-4"])
def test_the_summaries_of_team_4(finding: str) -> None:
    copied("teams/t4")
    row = json.dumps({"document": "a", "summary": "b"})
    write(legal__jsonl=f"{row}\n" * 344)
    assert {"LAB001", "LAB004", "MOD007"} <= {code for code, _ in codes("train_cluster_after.py")}
    assert "at most 86" in check("nods.py")["SCH001", "warmup_steps"]["message"]
    assert {"SCH001", "SCH005"} <= {code for code, _ in codes("nofilter.py")}


@needs_cases
@pytest.mark.parametrize("finding", ["TA6-5"])
def test_the_scripts_of_team_5(finding: str) -> None:
    copied("teams/t5")
    write(scripts_in_xlam__jsonl=json.dumps({"query": "a", "answers": "[]", "tools": "[]"}) + "\n")
    assert check("scripts/preproc_xlam.py")["CFG004", "ex['answer']"]["error"] == "E1020"
    found = {(each["code"], each["line"]) for each in check("run_ddp_1node.sbatch").values()}
    assert ("SLM030", 7) in found
    job = CliRunner().invoke(app, ["check", "run_ddp_1node.sbatch", "--json"]).stdout
    lacking = [each for each in json.loads(job.strip().splitlines()[-1])["findings"] if each["code"] == "SLM031"]
    assert [(each["line"], "--metrics_port" in each["message"]) for each in lacking] == [(11, True)]


@pytest.mark.parametrize("finding", ["FB16"])
@pytest.mark.parametrize(("more", "expected"), [("--fp16 true", {"PRC004"}), ("--fp16 false", set())])
def test_training_arguments_in_a_launch_line(finding: str, more: str, expected: set[str]) -> None:
    write(
        job__sh=f"""#!/bin/bash
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=16
torchrun --nproc_per_node=2 train.py --output_dir o --learning_rate 2e-4 --num_train_epochs 3 --bf16 true {more}
"""
    )
    assert {code for code, _ in codes("job.sh") if code.startswith("PRC")} == expected


@pytest.mark.parametrize("finding", ["FB6"])
@pytest.mark.parametrize(
    ("command", "multiplied"),
    [
        ("llamafactory-cli train x.yaml", True),
        ("axolotl train x.yaml", True),
        ("trl sft --config x.yaml", True),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config x.yaml", True),
        ("swift sft --model m", False),
        ("llamafactory-cli export x.yaml", False),
    ],
)
def test_training_tools_are_launchers(finding: str, command: str, multiplied: bool) -> None:
    write(job__sh=f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:2\nsrun {command}\n")
    assert ("SLM003" in {code for code, _ in codes("job.sh")}) is multiplied


@pytest.mark.parametrize("finding", ["TA6-5"])
@pytest.mark.parametrize(
    "count", ["$(nvidia-smi -L | wc -l)", '$(python -c "import torch; print(torch.cuda.device_count())")']
)
def test_counting_gpus(finding: str, count: str) -> None:
    write(
        job__sh="#!/bin/bash\n#SBATCH --ntasks=2\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:2\n"
        f"N={count}\nsrun torchrun --nproc_per_node=$N t.py\n"
    )
    assert "SLM003" in {code for code, _ in codes("job.sh")}


@pytest.mark.parametrize("finding", ["TA6-1"])
@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("LR = 0.2\n", "from config import LR\nlr = LR\n"),
        ("LR = 0.2\n", "import config\nlr = config.LR\n"),
        ("LR = 0.2\n", "from config import *\nlr = LR\n"),
        ("class Config:\n    lr = 0.2\n", "from config import Config\nlr = Config.lr\n"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    lr: float = 0.2\ncfg = Config()\n",
            "from config import cfg\nlr = cfg.lr\n",
        ),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.2)\n"
            "args = p.parse_args()\n",
            "from config import args\nlr = args.lr\n",
        ),
    ],
)
def test_values_of_a_config_module(finding: str, module: str, use: str) -> None:
    write(
        config__py=module,
        train__py=f"""from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
{use}
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
args_ = SFTConfig("o", learning_rate=lr)
SFTTrainer(model=model, args=args_, train_dataset=ds, peft_config=LoraConfig(r=8)).train()
""",
    )
    assert ("SCH003", "learning_rate") in codes("train.py")


@pytest.mark.parametrize("finding", ["TA6-1"])
@pytest.mark.parametrize(
    ("passed", "said"), [("", True), ("--lr 2e-4", False), ("--lr $LR", False), ("--lr 0.3", True)]
)
def test_a_launch_line_replaces_a_default(finding: str, passed: str, said: bool) -> None:
    write(
        train__py="""import argparse
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default=0.2)
a = p.parse_args()
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
SFTTrainer(model=model, args=SFTConfig("o", learning_rate=a.lr), train_dataset=ds, peft_config=LoraConfig(r=8)).train()
""",
        run__sh=f"#!/bin/bash\npython train.py {passed}\n",
    )
    assert (("SCH003", "learning_rate") in codes("train.py")) is said
