"""Where a run starts: a merged model, an adapter, FP8 and MXFP4 files through the stages, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from low_bits_files import FILE, edit, nano_copy, write_fp8, write_gpt_oss
from safetensors.torch import load_file, save_file
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json
from surefit.nano import PATH as NANO

INDEX = "model.safetensors.index.json"


def sharded(base: Path, parts: int = 4) -> dict[str, str]:
    """Splits the weights of a model over files; tensor → file."""
    weights = load_file(base / FILE)
    (base / FILE).unlink()
    places: dict[str, str] = {}
    for part in range(parts):
        names, file = sorted(weights)[part::parts], f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        save_file({name: weights[name] for name in names}, base / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def file_missing(base: Path) -> None:
    sharded(base)
    (base / "model-00002-of-00004.safetensors").unlink()


def tensor_elsewhere(base: Path) -> None:
    places = sharded(base)
    first = sorted(places)[0]
    (base / INDEX).write_text(json.dumps({"weight_map": places | {first: "model-00003-of-00004.safetensors"}}))


def pickles_alone(base: Path) -> None:
    torch.save(load_file(base / FILE), base / "pytorch_model.bin")
    (base / FILE).unlink()


def adapter_alone(base: Path) -> None:
    shutil.rmtree(base)
    base.mkdir()
    (base / "adapter_config.json").write_text("{}")


def adapter_beside(base: Path) -> None:
    (base / "adapter_config.json").write_text("{}")


def deepseek_v4(base: Path) -> None:
    edit(base, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"})


def hqq(base: Path) -> None:
    edit(base, quantization_config={"quant_method": "hqq"})


def own_code(base: Path) -> None:
    edit(base, model_type="house", auto_map={"AutoConfig": "configuration_house.HouseConfig",
                                             "AutoModelForCausalLM": "modeling_house.HouseForCausalLM"})  # fmt: skip
    for file in ("configuration_house.py", "modeling_house.py"):
        (base / file).write_text(f"open({str(base / 'RAN')!r}, 'w')\n")


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (file_missing, ("MOD001", "model-00002-of-00004.safetensors")),
        (tensor_elsewhere, ("MOD001", "is not in model-00003-of-00004.safetensors, contrary to the index")),
        (pickles_alone, ("MOD003", "has only pickled weights")),
        (adapter_alone, ("MOD001", "a LoRA adapter, not a base model", "lora.start_from", "merge this one first")),
        (adapter_beside, ("MOD001", "the model directory also contains an adapter")),
        (deepseek_v4, ("MOD015", "as DeepSeek-V4 is published", "use a bfloat16 copy of it")),
        (hqq, ("MOD015", "has quantized files (hqq), which SureFit does not read")),
        (own_code, ("MOD013", "configuration_house.py, modeling_house.py", "model.trust_remote_code: true")),
    ],
)
def test_a_start_that_is_refused(
    surefit: Surefit, config: Path, tmp_path: Path, breaks: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    base = nano_copy(tmp_path / "base")
    breaks(base)
    option = ["--set", f"model.name_or_path={base}"]
    checked, started = surefit("check", config, *option), surefit("train", config, *option)
    # Where no model can be read, training stops before the rules: 2, and no rule's code.
    assert (checked.code, started.code in (1, 2)) == (1, True), started.text
    for answer, expected in ((checked, said), (started, said[1:])):
        text = " ".join(answer.text.split())
        assert all(words in text for words in expected), answer.text
        assert "Traceback" not in text
    assert not (base / "RAN").exists()
    assert not (tmp_path / "runs/one/adapter").exists()


def trained(surefit: Surefit, config: Path, base: Path | str, output: str, *more: str) -> RunDir:
    """A run through check, train, merge and certificate."""
    options = [f"model.name_or_path={base}", f"output_dir={output}", *more]
    sets = [part for option in options for part in ("--set", option)]
    for verb in ("check", "train", "merge"):
        answer = surefit(verb, *([config, *sets] if verb != "merge" else [output]))
        assert answer.code == 0, answer.text
    run = RunDir(Path(output))
    assert read_json(run.certificate)["passed"] is True
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(torch.arange(2, 34).unsqueeze(0)).logits  # type: ignore[no-any-return]


def same_in_transformers_and_peft(run: RunDir, base: Path) -> None:
    """The merged model as plain transformers loads it, against base + adapter as PEFT loads them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = logits(AutoModelForCausalLM.from_pretrained(run.merged, dtype=torch.float32))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    beside = logits(PeftModel.from_pretrained(plain, run.adapter))
    assert (merged - beside).norm() <= 0.02 * beside.norm()
    assert (merged - beside).norm() < (merged - before).norm()


@pytest.mark.slow
def test_what_was_merged_is_the_base_of_the_next_run(surefit: Surefit, config: Path) -> None:
    first = trained(surefit, config, "surefit/nano", "runs/first")
    second = trained(surefit, config, first.merged, "runs/second")
    same_in_transformers_and_peft(second, first.merged)


@pytest.mark.slow
def test_an_adapter_is_trained_on(surefit: Surefit, config: Path) -> None:
    first = trained(surefit, config, "surefit/nano", "runs/first")
    second = trained(surefit, config, "surefit/nano", "runs/second", f"lora.start_from={first.adapter}")
    same_in_transformers_and_peft(second, Path(NANO))
    refused = surefit("check", config, "--set", f"lora.start_from={first.adapter}", "--set", "lora.r=3")
    assert (refused.code, "ADP005" in refused.text) == (1, True)
    # On top of what it was merged into, it would be added twice.
    options = ["--set", f"lora.start_from={first.adapter}", "--set", f"model.name_or_path={first.merged}"]
    warned = surefit("check", config, *options)
    assert "MOD017" in warned.text
    stopped = surefit("train", config, *options, "--set", "output_dir=runs/third")
    assert stopped.code != 0
    assert "Traceback" not in stopped.text


@pytest.mark.parametrize("other", ["shards", "pickle beside"])
def test_files_that_need_no_word(surefit: Surefit, config: Path, tmp_path: Path, other: str) -> None:
    base = nano_copy(tmp_path / "base")
    if other == "shards":
        sharded(base)
    else:  # other weights, which nothing may load
        torch.save({name: tensor * 0 for name, tensor in load_file(base / FILE).items()}, base / "pytorch_model.bin")
    same_in_transformers_and_peft(trained(surefit, config, base, "runs/first"), Path(NANO))


@pytest.mark.parametrize("write", [write_fp8, write_gpt_oss])
def test_low_bits_through_the_stages(
    surefit: Surefit, config: Path, tmp_path: Path, write: Callable[[Path], Any]
) -> None:
    from surefit.model.load import model_path

    base = tmp_path / "base"
    write(base)
    option = ["--set", f"model.name_or_path={base}"]
    assert "MOD016" in surefit("check", config, *option).text
    assert any("dequantized copy" in text for text in surefit("plan", config, *option, "--json").json["left_out"])
    assert not (tmp_path / "cache/dequantized").exists()
    run = trained(surefit, config, base, "runs/first")
    assert "quantization_config" not in read_json(run.merged / "config.json")
    same_in_transformers_and_peft(run, Path(model_path(str(base))))


@pytest.mark.slow
def test_an_adapter_on_top_of_an_adapter_is_the_base_and_both(surefit: Surefit, config: Path) -> None:
    """Merged one after the other, against PEFT's own arithmetic with both adapters beside the untouched base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    first = trained(surefit, config, "surefit/nano", "runs/first")
    merged = surefit("merge", first.adapter, "--base", "surefit/nano", "--output", "runs/alone")
    assert merged.code == 0, merged.text
    second = trained(surefit, config, Path("runs/alone/merged"), "runs/second", "lora.r=4", "lora.lora_alpha=8")
    base = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    before = logits(base)
    beside = PeftModel.from_pretrained(base, first.adapter).merge_and_unload()
    both = logits(PeftModel.from_pretrained(beside, second.adapter))
    whole = logits(AutoModelForCausalLM.from_pretrained(second.merged, dtype=torch.float32))
    assert (whole - both).norm() <= 0.02 * both.norm()
    assert (whole - both).norm() < 0.5 * (whole - before).norm()


@pytest.mark.parametrize("several", ["[runs/a/adapter, runs/b/adapter]", "runs/a/adapter,runs/b/adapter"])
def test_several_adapters_are_refused_with_the_way_to_stack_them(surefit: Surefit, config: Path, several: str) -> None:
    refused = surefit("check", config, "--set", f"lora.start_from={several}")
    assert refused.code != 0
    assert "merge the others first" in " ".join(refused.text.split())


@pytest.mark.slow
def test_code_that_was_allowed_goes_with_what_is_merged(
    surefit: Surefit, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = nano_copy(tmp_path / "base")
    own_code(base)
    edit(base, architectures=["HouseForCausalLM"])
    (base / "configuration_house.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass HouseConfig(LlamaConfig):\n    model_type = 'house'\n"
    )
    (base / "modeling_house.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_house import HouseConfig\n"
        "from .rope_utils import NOTHING  # noqa: F401\n\n\n"
        "class HouseForCausalLM(LlamaForCausalLM):\n    config_class = HouseConfig\n"
    )
    (base / "rope_utils.py").write_text("NOTHING = None\n")
    (base / "train.py").write_text("TOKEN = 'of somebody who trained it here'\n")
    run = trained(surefit, config, base, "runs/first", "model.trust_remote_code=true")
    code = {"configuration_house.py", "modeling_house.py", "rope_utils.py"}
    assert {file.name for file in run.merged.glob("*.py")} == code
    for kind, brought in (("hub", code), ("adapter", set())):
        exported = surefit("export", run.path, "--format", kind, "--output", kind)
        assert exported.code == 0, exported.text
        assert {file.name for file in Path(kind).glob("*.py")} == brought


@pytest.mark.slow
def test_rows_of_new_tokens_are_merged_first(surefit: Surefit, config: Path) -> None:
    tokens = 'model.add_tokens=["<call>", "</call>"]'
    plain = trained(surefit, config, "surefit/nano", "runs/plain")
    first = trained(surefit, config, "surefit/nano", "runs/first", tokens)
    start = f"lora.start_from={first.adapter}"
    for verb in ("check", "train"):
        refused = surefit(verb, config, "--set", tokens, "--set", start)
        assert refused.code != 0
        assert ("ADP005" in refused.text, "rows of new tokens" in refused.text) == (True, True), refused.text
    trained(surefit, config, first.merged, "runs/second")
    # New rows beside factors that have learnt something are no obstacle.
    trained(surefit, config, "surefit/nano", "runs/third", tokens, f"lora.start_from={plain.adapter}")


@pytest.mark.slow
def test_an_adapter_beside_experts_is_trained_on(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_gpt_oss(base)
    first = trained(surefit, config, base, "runs/first", "lora.experts=true")
    start = f"lora.start_from={first.adapter}"
    trained(surefit, config, base, "runs/second", "lora.experts=true", start)
    refused = surefit("check", config, "--set", f"model.name_or_path={base}", "--set", start)
    assert (refused.code, "ADP005" in refused.text) == (1, True)
