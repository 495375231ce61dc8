"""Adapters of PEFT in all their kinds: merged file by file, they are what PEFT answers with them."""

from __future__ import annotations

import json

import families
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError, GateError
from surefit.core.rundir import read_json
from surefit.merge.adapter_file import read_adapter
from surefit.merge.combine import AdapterCombination, combine_adapters
from surefit.merge.merge import MergeJob, certify_merged, merge_adapter_job
from surefit.model.adapter import lora_modules, require_complete_adapter
from surefit.model.layerwise_forward import LayerwiseModel, WeightFiles

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 32}},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "token rows": {"trainable_token_indices": [3, 7], "target_modules": ["q_proj"]},
}


class Cpu:
    kind = "cpu"


def make(folder, tokenizer, family="llama", biases=False, tied=False, **settings):
    """A base in several files and an adapter of PEFT's own, whose factors are random, beside it."""
    torch.manual_seed(0)
    model = families.build(
        family, vocab_size=len(tokenizer), tie_word_embeddings=tied, **({"attention_bias": True} if biases else {})
    )
    model.save_pretrained(folder / "base", max_shard_size="30KB")
    tokenizer.save_pretrained(folder / "base")
    config = LoraConfig(
        **({"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings)
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn_like(parameter)
            parameter.data = (
                noise * 0.1 if "lora_" in name and "magnitude" not in name else parameter.data + 0.1 * noise
            )
    adapted.save_pretrained(folder / "adapter")
    return folder


def job(folder, **changes):
    base = ModelSection(name_or_path=str(folder / "base"), dtype="float32")
    given = {
        "base": base,
        "adapter": folder / "adapter",
        "merged": folder / "merged",
        "certificate": folder / "certificate.json",
    }
    return MergeJob(**(given | changes))


def empty(folder):
    """The base without its weights."""
    return LayerwiseModel(job(folder).base, folder / "base", "cpu")


@pytest.fixture(scope="module")
def rows():
    return torch.randint(5, 250, (6, 20), generator=torch.Generator().manual_seed(1)).tolist()


def answers(folder, rows):
    ids = torch.tensor(rows)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = PeftModel.from_pretrained(base, folder / "adapter", autocast_adapter_dtype=False).eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        return adapted(ids).logits, merged(ids).logits


@pytest.mark.parametrize("name", KINDS)
def test_the_merged_model_answers_as_peft_does(tmp_path, tiny_tokenizer, rows, name):
    folder = make(tmp_path, tiny_tokenizer, biases=name == "lora_bias", **KINDS[name])
    certificate = merge_adapter_job(job(folder), Cpu(), rows)
    assert certificate["passed"]
    assert certificate["base_recorded"] is False, "PEFT does not say which base's bytes"
    adapted, merged = answers(folder, rows)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    again = certify_merged(job(folder), Cpu(), rows)
    assert again["passed"], again["reason"]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "phi3", "opt", "qwen3_moe"])
def test_families_with_other_layers_and_names(tmp_path, tiny_tokenizer, rows, family):
    targets = ["q_proj", "v_proj"] if family == "qwen3_moe" else "all-linear"
    folder = make(tmp_path, tiny_tokenizer, family, target_modules=targets)
    assert merge_adapter_job(job(folder), Cpu(), rows)["passed"]
    adapted, merged = answers(folder, rows)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"target_parameters": [GATE_UP, DOWN]}),
        ("qwen3_moe", {"target_parameters": [DOWN], "use_rslora": True}),
        ("mixtral", {"target_parameters": [DOWN, GATE_UP], "target_modules": []}),
        ("mixtral", {"target_parameters": [GATE_UP, DOWN], "rank_pattern": {DOWN: 3}, "alpha_pattern": {DOWN: 5}}),
        ("gpt_oss", {"target_parameters": [GATE_UP, DOWN]}),
        ("gpt_oss", {"target_parameters": [GATE_UP, DOWN, "mlp.router.weight"]}),
        ("qwen3_moe", {"target_parameters": ["mlp.gate.weight"], "rank_pattern": {"mlp.gate.weight": 2}}),
        ("mixtral", {"target_parameters": [DOWN, "mlp.gate.weight"]}),
        ("qwen3_moe", {"modules_to_save": ["gate"]}),
    ],
)
def test_factors_beside_experts(tmp_path, tiny_tokenizer, rows, family, settings, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "gpt_oss", GPT_OSS)
    folder = make(tmp_path, tiny_tokenizer, family, **({"target_modules": ["q_proj", "v_proj"]} | settings))
    certificate = merge_adapter_job(job(folder), Cpu(), rows)
    assert certificate["passed"]
    adapted, merged = answers(folder, rows)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert WeightFiles(folder / "merged").names == WeightFiles(folder / "base").names
    again = certify_merged(job(folder), Cpu(), rows)
    assert again["passed"], again["reason"]


def damage(folder, change):
    """Change the factors of expert 2 of layer 0's down_proj, which is wrapped last, as PEFT has saved them."""
    file = folder / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    at = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"
    a, b = change(tensors[at.format("A")].view(4, 4, -1), tensors[at.format("B")].view(-1, 4, 4))
    tensors |= {at.format("A"): a.flatten(0, 1).contiguous(), at.format("B"): b.flatten(1).contiguous()}
    save_file(tensors, file, metadata={"format": "pt"})


def without(a, b):
    kept = torch.tensor([0, 1, 3])
    return a[kept], b[:, :, kept]


def zeroed(a, b):
    a[2], b[:, :, 2] = 0, 0
    return a, b


def only_b_zeroed(a, b):
    b[:, :, 2] = 0
    return a, b


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without, r"layers\.0\.mlp\.experts\.down_proj has factors \(12, \d+\) .* where 4 experts"),
        (zeroed, r"expert 2 of model\.layers\.0\.mlp\.experts\.down_proj has no factors"),
        (only_b_zeroed, r"expert 2 of model\.layers\.0\.mlp\.experts\.down_proj has a lora_B of zeros"),
    ],
)
def test_an_expert_without_factors_is_refused_by_name(tmp_path, tiny_tokenizer, rows, change, text):
    folder = make(tmp_path, tiny_tokenizer, "qwen3_moe", target_modules=["q_proj"], target_parameters=[GATE_UP, DOWN])
    damage(folder, change)
    with pytest.raises(GateError, match=text):
        merge_adapter_job(job(folder), Cpu(), rows)


@pytest.mark.parametrize("change", [zeroed, only_b_zeroed])
def test_training_refuses_an_expert_without_factors(tmp_path, tiny_tokenizer, change):
    folder = make(tmp_path, tiny_tokenizer, "qwen3_moe", target_modules=["q_proj"], target_parameters=[GATE_UP, DOWN])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    modules = lora_modules(PeftModel.from_pretrained(base, folder / "adapter"))
    require_complete_adapter(folder / "adapter", modules)
    damage(folder, change)
    with pytest.raises(GateError, match=r"expert 2 of model\.layers\.0\.mlp\.experts\.down_proj"):
        require_complete_adapter(folder / "adapter", modules)


def test_a_stack_without_factors_is_refused_by_name(tmp_path, tiny_tokenizer, rows):
    folder = make(tmp_path, tiny_tokenizer, "qwen3_moe", target_modules=["q_proj"], target_parameters=[GATE_UP, DOWN])
    file = folder / "adapter/adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.experts.lora" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(GateError, match=r"layers\.1\.mlp\.experts\.down_proj has no factors"):
        merge_adapter_job(job(folder), Cpu(), rows)


def test_adapters_of_experts_are_not_combined(tmp_path, tiny_tokenizer):
    folder = make(tmp_path, tiny_tokenizer, "qwen3_moe", target_modules=["q_proj"], target_parameters=[DOWN])
    twice = AdapterCombination("cat", ((folder / "adapter", 0.5), (folder / "adapter", 0.5)))
    with pytest.raises(GateError, match="factors for experts"):
        combine_adapters(empty(folder), twice, tmp_path)


def test_a_parameter_that_is_no_stack_of_experts_is_refused(tmp_path, tiny_tokenizer, rows):
    folder = make(tmp_path, tiny_tokenizer, target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"])
    with pytest.raises(GateError, match="no matching stack of experts"):
        merge_adapter_job(job(folder), Cpu(), rows)


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_a_tied_weight_that_is_changed_on_one_side_is_tied_no_longer(tmp_path, tiny_tokenizer, rows, settings):
    folder = make(tmp_path, tiny_tokenizer, tied=True, **settings)
    assert merge_adapter_job(job(folder), Cpu(), rows)["passed"]
    assert read_json(folder / "merged/config.json")["tie_word_embeddings"] is False
    adapted, merged = answers(folder, rows)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_a_tied_model_leaves_it_tied(tmp_path, tiny_tokenizer, rows):
    folder = make(tmp_path, tiny_tokenizer, tied=True)
    assert merge_adapter_job(job(folder), Cpu(), rows)["passed"]
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "LOHA"}, "its type is LOHA"),
        ({"init_lora_weights": "pissa"}, "initialized by pissa"),
        ({"layer_replication": [[0, 1]]}, "repeats layers"),
        ({"r": 8}, "but the rank is 8"),
        ({"use_dora": True}, "no DoRA magnitude"),
    ],
)
def test_what_cannot_be_merged_by_its_weights_is_refused_by_name(tmp_path, tiny_tokenizer, change, text):
    folder = make(tmp_path, tiny_tokenizer)
    file = folder / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(GateError, match=text):
        read_adapter(folder / "adapter")


def test_half_of_a_pair_of_factors_is_refused(tmp_path, tiny_tokenizer):
    folder = make(tmp_path, tiny_tokenizer)
    file = folder / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(GateError, match=r"lora_A\.weight only"):
        read_adapter(folder / "adapter")


def test_a_merge_that_another_tool_made_is_certified_or_not(tmp_path, tiny_tokenizer, rows):
    """PEFT's own merge in float32 passes; the same with another alpha does not."""
    folder = make(tmp_path, tiny_tokenizer)
    for alpha in (16, 20):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.scaling["default"] = alpha / 4
        model.merge_and_unload().save_pretrained(folder / f"theirs-{alpha}")
        tiny_tokenizer.save_pretrained(folder / f"theirs-{alpha}")
    assert certify_merged(job(folder, merged=folder / "theirs-16"), Cpu(), rows)["passed"]
    wrong = certify_merged(job(folder, merged=folder / "theirs-20"), Cpu(), rows)
    assert not wrong["passed"]
    assert "merge_rounding" in wrong["reason"]


@pytest.mark.parametrize("way", ["cat", "linear", "ties", "magnitude_prune", "dare_linear", "dare_ties", "svd"])
def test_two_adapters_are_combined_as_peft_combines_them(tmp_path, tiny_tokenizer, rows, way, monkeypatch):
    folder = make(tmp_path, tiny_tokenizer)
    other = make(tmp_path / "other", tiny_tokenizer, r=8 if way == "cat" else 4)
    parts = [(folder / "adapter", 0.7), (other / "adapter", 0.5)]
    density = 1.0 if "dare" in way else 0.5  # dare drops at random, and the draws of PEFT are others
    monkeypatch.setattr("surefit.merge.combine.DENSITY", density)
    combined = AdapterCombination(way, tuple(parts))
    adapter = combine_adapters(empty(folder), combined, tmp_path)
    certificate = merge_adapter_job(job(folder, adapter=adapter, combined=combined), Cpu(), rows)
    assert certificate["passed"]
    assert certificate["combined"]["exact_sum"] is (way == "cat")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "base"), parts[0][0], "a", autocast_adapter_dtype=False
    )
    theirs.load_adapter(parts[1][0], "b", autocast_adapter_dtype=False)
    torch.manual_seed(0)
    options = {} if way in ("cat", "linear", "svd") else {"density": density}
    theirs.add_weighted_adapter(["a", "b"], [0.7, 0.5], "both", combination_type=way, **options)
    theirs.set_adapter("both")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        expected, found = theirs.eval()(torch.tensor(rows)).logits, merged(torch.tensor(rows)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_combined_in_this_way(tmp_path, tiny_tokenizer):
    folder = make(tmp_path, tiny_tokenizer)
    other = make(tmp_path / "other", tiny_tokenizer, r=8)
    both = AdapterCombination("ties", ((folder / "adapter", 1.0), (other / "adapter", 1.0)))
    with pytest.raises(ConfigError, match="by ties"):
        combine_adapters(empty(folder), both, tmp_path)
