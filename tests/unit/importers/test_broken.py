"""Maintained configs of other tools, each broken in one place: is it found, and on the line that was broken?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from surefit.cli.other_tools import run_applicable_rules
from surefit.core.errors import SureFitError
from surefit.importers import read_tool_config
from surefit.lint.engine import all_rules

COLLECTION = Path(__file__).parents[4] / "shared/data/foreign_configs"
EACH = 2
"""Files that each kind of breakage is tried in."""
QUICK = ("trl", "peft", "slurm")
"""Tools whose files are few or small: the default suite tries these."""
BREAKS: dict[str, list[tuple[str, str]]] = {
    "axolotl": [
        # words
        (r"^(lr_scheduler: ).*", r"\1cosin"),
        (r"^(lr_scheduler: ).*", r"\1cosine_decay"),
        (r"^(optimizer: ).*", r"\1adamw_bnb_8bits"),
        (r"^(optimizer: ).*", r"\1adam"),
        (r"^(adapter: )lora.*", r"\1lorra"),
        (r"^(adapter: )qlora.*", r"\1qlorra"),
        (r"^(chat_template: ).*", r"\1llama33"),
        (r"^(    type: )chat_template.*", r"\1chat_templte"),
        (r"^(    type: )alpaca.*", r"\1alpacca"),
        (r"^(    type: )alpaca.*", r"\1sharegpt"),
        (r"^(rl: ).*", r"\1dpoo"),
        (r"^(attn_implementation: ).*", r"\1flash"),
        (r"^(  (fsdp_)?state_dict_type: ).*", r"\1FULL_STATE"),
        (r"^(  (fsdp_)?auto_wrap_policy: ).*", r"\1TRANSFORMER_WRAP"),
        # names
        (r"^learning_rate(: .*)", r"learning_rat\1"),
        (r"^micro_batch_size(: .*)", r"micro_batchsize\1"),
        (r"^gradient_accumulation_steps(: .*)", r"gradient_acumulation_steps\1"),
        (r"^sequence_len(: .*)", r"sequence_length\1"),
        (r"^lora_alpha(: .*)", r"lora_alfa\1"),
        (r"^sample_packing(: .*)", r"sample_paking\1"),
        (r"^val_set_size(: .*)", r"val_setsize\1"),
        # types and ranges
        (r"^(micro_batch_size: ).*", r"\1two"),
        (r"^(micro_batch_size: ).*", r"\g<1>0"),
        (r"^(sequence_len: ).*", r"\1[2048]"),
        (r"^(num_epochs: ).*", r"\1many"),
        (r"^(num_epochs: ).*", r"\1-1"),
        (r"^(learning_rate: ).*", r"\1fast"),
        (r"^(learning_rate: ).*", r"\1-0.0002"),
        (r"^(lora_r: ).*", r"\g<1>8.5"),
        (r"^(lora_dropout: ).*", r"\g<1>5"),
        (r"^(warmup_ratio: ).*", r"\g<1>10"),
        (r"^(bf16: ).*", r"\1maybe"),
        (r"^(gradient_checkpointing: ).*", r"\1sometimes"),
        (r"^(val_set_size: ).*", r"\1-0.1"),
        (r"^(special_tokens:)\s*$", r"\1 <pad>"),
        # together
        (r"^(warmup_ratio: .*)", "\\1\nwarmup_steps: 10"),
        (r"^(saves_per_epoch: .*)", "\\1\nsave_steps: 10"),
        (r"^(evals_per_epoch: .*)", "\\1\neval_steps: 10"),
        (r"^(sample_packing: )true.*", "\\1true\nrl: dpo"),
        (r"^(load_in_4bit: )true.*", "\\1true\nload_in_8bit: true"),
        (r"^(adapter: )qlora.*", r"\1"),
        (r"^(load_in_4bit: )true.*", r"\1false"),
        (r"^(gradient_accumulation_steps: .*)", "\\1\nbatch_size: 64"),
    ],
    "llamafactory": [
        (r"^(stage: )sft.*", r"\1sftt"),
        (r"^(finetuning_type: )lora.*", r"\1qlora"),
        (r"^(template: ).*", r"\1qwen33"),
        (r"^(lr_scheduler_type: ).*", r"\1cosin"),
        (r"^(eval_strategy: ).*", r"\1step"),
        (r"^(flash_attn: ).*", r"\1flash2"),
        (r"^(quantization_bit: ).*", r"\g<1>5"),
        (r"^(quantization_method: ).*", r"\1bnbs"),
        (r"^cutoff_len(: .*)", r"cutof_len\1"),
        (r"^lora_rank(: .*)", r"lora_ranks\1"),
        (r"^learning_rate(: .*)", r"leaning_rate\1"),
        (r"^per_device_train_batch_size(: .*)", r"per_device_batch_size\1"),
        (r"^(cutoff_len: ).*", r"\1long"),
        (r"^(lora_rank: ).*", r"\g<1>0"),
        (r"^(learning_rate: ).*", r"\1[1.0e-4]"),
        (r"^(num_train_epochs: ).*", r"\1three"),
        (r"^(warmup_ratio: ).*", r"\g<1>1.5"),
        (r"^(bf16: true.*)", "\\1\nfp16: true"),
        (r"^(finetuning_type: )full.*", "\\1full\nquantization_bit: 4"),
        (r"^(finetuning_type: )lora.*", "\\1lora\nuse_galore: true"),
        (r"^(finetuning_type: )full.*", "\\1full\nuse_dora: true"),
        (r"^(val_size: .*)", "\\1\neval_dataset: identity"),
        (r"^(export_dir: .*)", "\\1\nquantization_bit: 4"),
    ],
    "trl": [
        (r"^(lr_scheduler_type: ).*", r"\1cosine_lr"),
        (r"^(gradient_accumulation_steps: ).*", r"\1four"),
        (r"^(learning_rate: ).*", r"\1small"),
        (r"^(eval_strategy: ).*", r"\1always"),
        (r"^learning_rate(: .*)", r"learning_rte\1"),
        (r"^(bf16: true.*)", "\\1\nfp16: true"),
    ],
    "accelerate": [
        (r"^(mixed_precision: ).*", r"\1bfloat16"),
        (r"^(distributed_type: ).*", r"\1FDSP"),
        (r"^num_processes(: .*)", r"num_proceses\1"),
        (r"^(num_processes: ).*", r"\1eight"),
        (r"^(machine_rank: ).*", r"\g<1>5"),
        (r"^(\s+fsdp_sharding_strategy: ).*", r"\1FULL"),
        (r"^(\s+fsdp_state_dict_type: ).*", r"\1SHARDED"),
        (r"^(\s+fsdp_auto_wrap_policy: ).*", r"\1TRANSFORMER"),
        (r"^(\s+zero_stage: ).*", r"\g<1>4"),
        (r"^(\s+offload_optimizer_device: ).*", r"\1gpu"),
        (r"^(\s+)fsdp_offload_params(: .*)", r"\1fsdp_ofload_params\2"),
        (r"^(compute_environment: ).*", r"\1MY_MACHINE"),
        (r"^(num_machines: ).*", r"\g<1>0"),
        (r"^(main_process_port: ).*", r"\g<1>99999"),
    ],
    "deepspeed": [
        (r'("stage": )\d', r"\g<1>5"),
        (r'("overlap_comm": )\w+', r'\1"often"'),
        (r'("type": )"Adam\w*"', r'\1"AdamX"'),
        (r'("type": )"Warmup\w*"', r'\1"WarmupLinear"'),
        (r'("device": )"cpu"', r'\1"disk"'),
        (r'"reduce_scatter"', '"reduce_scater"'),
        (r'"zero_optimization"', '"zero_optimisation"'),
        (r'("gradient_clipping": )[\d.]+', r"\1-1.0"),
        (r'("train_micro_batch_size_per_gpu": )\d+', r"\g<1>0"),
        (r'("steps_per_print": )\d+', r'\1"ten"'),
        (r'("contiguous_gradients": \w+)\s*$', r"\1,"),
    ],
    "peft": [
        (r'("peft_type": )"\w+"', r'\1"LORRA"'),
        (r'("task_type": )"\w+"', r'\1"CAUSAL"'),
        (r'("bias": )"\w+"', r'\1"lora"'),
        (r'("r": )\d+', r"\1-8"),
        (r'("lora_dropout": )[\d.]+', r"\g<1>1.5"),
        (r'"lora_alpha"', '"lora_alfa"'),
        (r'("lora_alpha": )\d+', r'\1"high"'),
        (r'("init_lora_weights": )\w+', r'\1"pisa"'),
        (r'("use_rslora": )\w+', r'\1"perhaps"'),
    ],
    "slurm": [
        (r"^(#SBATCH --time=).*", r"\g<1>24h"),
        (r"^(#SBATCH --time=).*", r"\g<1>1-26:61:00x"),
        (r"^(#SBATCH --mem=).*", r"\g<1>64 GB per node"),
        (r"^(#SBATCH --gres=)gpu:\d.*", r"\1gpu=4"),
        (r"^(#SBATCH --)ntasks-per-node(.*)", r"\1ntask-per-nodes\2"),
        (r"^(#SBATCH --ntasks-per-node=).*", r"\1one"),
        (r"^#(SBATCH --gres.*)", r"# \1"),
        (r"^(#SBATCH --cpus-per-task=)\d+", r"\1$CPUS"),
        (r"^#!/bin/bash.*", "# job"),
        (r"^(#SBATCH --)output=(.*)", r"#SBATCH -output=\2"),
        (r"^(#SBATCH --nodes=)\d+", r"\1two"),
        (r"^(#SBATCH --requeue)", r"#SBATCH requeue"),
        (r"^(accelerate launch .*)\$SCRIPT (.*)", r"\1python train.py"),
    ],
}


@dataclass(frozen=True)
class Broken:
    """A text with its one broken line, 1-based, and where it comes from."""

    source: str
    text: str
    line: int
    what: str


def files(tool: str) -> list[Path]:
    """Maintained files that the tool's own parser takes, at most one from each folder."""
    index = [json.loads(line) for line in (COLLECTION / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen: dict[str, Path] = {}
    for entry in index:
        if entry["tool"] == tool and entry["tag"] in ("", "sft", "export") and len(entry) == 3:
            chosen.setdefault(str(Path(entry["file"]).parent), COLLECTION / entry["file"])
    return list(chosen.values())


def broken(tool: str) -> Iterator[Broken]:
    """Every kind of breakage, in up to two files each."""
    texts = [(path, path.read_text(encoding="utf-8").splitlines()) for path in files(tool)]
    for pattern, replacement in BREAKS[tool]:
        tried = 0
        for path, lines in texts:
            at = next((i for i, line in enumerate(lines) if re.search(pattern, line)), None)
            if at is None or tried == EACH:
                continue
            new = re.sub(pattern, replacement, lines[at])
            if new == lines[at]:
                continue
            tried += 1
            added = new.count("\n")
            text = "\n".join([*lines[:at], new, *lines[at + 1 :]]) + "\n"
            yield Broken(str(path), text, at + 1 + added, f"{lines[at].strip()} → {new.strip()}")


def lines_found(text: str, path: Path) -> set[int]:
    """The lines that any finding names."""
    path.write_text(text, encoding="utf-8")
    try:
        found = read_tool_config(path)
    except SureFitError as error:
        return {error.line} if error.line else set()
    return {
        finding.line
        for finding in run_applicable_rules(found, all_rules())[0].findings
        if finding.line and finding.severity != "info"
    }


def caught(tool: str, folder: Path) -> tuple[int, list[str]]:
    """How many of the breakages there are, and those that no finding names on its line (or the one above)."""
    missed, count = [], 0
    for one in broken(tool):
        count += 1
        before = lines_found(Path(one.source).read_text(encoding="utf-8"), folder / Path(one.source).name)
        new = lines_found(one.text, folder / Path(one.source).name) - before
        if not {one.line, one.line - one.what.count("\n")} & new:
            missed.append(f"{Path(one.source).relative_to(COLLECTION)}:{one.line}: {one.what} (named: {sorted(new)})")
    return count, missed


@pytest.mark.skipif(
    not COLLECTION.is_dir(), reason="the collection of other tools' configs is not beside the repository"
)
@pytest.mark.parametrize(
    "tool", [tool if tool in QUICK else pytest.param(tool, marks=pytest.mark.slow) for tool in BREAKS]
)
def test_a_broken_line_of_a_maintained_config_is_named(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    count, missed = caught(tool, tmp_path)
    assert count >= len(BREAKS[tool]) * 0.6, "the patterns still fit the files"
    assert len(missed) <= 0.1 * count, "\n".join(missed)
