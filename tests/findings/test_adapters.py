"""Adapters of PEFT: merged, summed and continued they are the model that was trained, or an error by name.

The adapters are made by benchmarks/adapter_matrix.py, which runs all of them over four bases.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tests.cli.conftest import call as surefit

from surefit.config.schema import LoraSection
from surefit.core.errors import GateError, SureFitError
from surefit.core.rundir import read_json
from surefit.facts import lora_settings
from surefit.merge.adapter_file import Update
from surefit.merge.combine import AdapterCombination, combine_adapters
from surefit.merge.fold import fold_update, rounding_error
from surefit.merge.merge import MergeJob, merge_adapter_job
from surefit.model.adapter import add_adapter, load_initial_adapter
from surefit.model.layerwise_forward import LayerwiseModel
from surefit.model.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[2] / "benchmarks/adapter_matrix.py"
_spec = importlib.util.spec_from_file_location("adapter_matrix", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
matrix = importlib.util.module_from_spec(_spec)
sys.modules["adapter_matrix"] = matrix
_spec.loader.exec_module(matrix)

SUM, TWICE = "option + plain", "plain + option"
NO_SUM = {SUM: "E6400", TWICE: "E6400"}
OTHER_BASE = {"merge": "E6002", SUM: "E6002", TWICE: "E6002", "continue": "E5400"}
WRONG_NAMES = {"merge": "E5402", SUM: "E5402", TWICE: "E5402", "continue": "E5402"}
EMPTY = {"merge": "E5403", SUM: "E5403", TWICE: "E5403"}
MERGED = {"merge": "equal"}
TIED = "llama tied"
CASES = [
    ("R1", "llama", "rslora", {SUM: "equal", TWICE: "equal"}),
    ("R1", "llama", "patterns + rslora", {TWICE: "equal"}),
    ("R1", "llama", "dora", NO_SUM),
    ("R1", "llama", "norms whole", NO_SUM | {"continue": "E5027"}),
    ("R1", "gpt2 tied", "plain", {SUM: "equal"}),
    ("R1", "gpt2 tied", "lora_bias", NO_SUM | {"continue": "E5027"}),
    ("R1", TIED, "token rows", NO_SUM | {"continue": "E5028"}),
    ("R2", "llama", "lora_ga", OTHER_BASE),
    ("R2", "llama", "lora_ga converted", MERGED | {"continue": "equal"}),
    ("R3", "llama", "pissa", OTHER_BASE),
    ("R3", "llama", "olora", OTHER_BASE),
    ("R3", "llama", "pissa_niter_4", OTHER_BASE),
    ("R3", "llama", "corda", OTHER_BASE),
    ("R3", "llama", "mica", MERGED | {"continue": "equal"}),
    ("R3", "llama", "alora", OTHER_BASE),
    ("R3", "llama", "a setting of a newer PEFT", OTHER_BASE),
    ("R3", "llama", "a setting of a newer PEFT, off", {"continue": "equal"}),
    ("R4", TIED, "factors of both", MERGED),
    ("R4", TIED, "embedding and head whole", MERGED | NO_SUM),
    ("R4", "gpt2 tied", "embedding and head whole", MERGED),
    ("R4", "gpt2 tied", "factors of both, tied", {"merge": "E6750", SUM: "E6750"}),
    ("R6", "gpt2 tied", "bias lora_only", MERGED | NO_SUM),
    ("R6", "qwen2 with biases", "bias all", MERGED),
    ("R6", "qwen2 with biases", "bias dropped by PEFT 0.19", {"merge": "E6019"}),
    ("R7", TIED, "resized", MERGED | {"continue": "E5750"}),
    ("R7", TIED, "resized, embeddings not saved", {"merge": "E6401", "continue": "equal"}),
    ("R7", TIED, "resized, token rows", MERGED),
    ("R7", "llama", "resized, both whole", MERGED),
    ("R8", "llama", "emptied by ZeRO-3", EMPTY),
    ("R8", "llama", "head emptied", EMPTY),
    ("R12", "llama", "names of torch.compile", WRONG_NAMES),
    ("R12", "llama", "a pickle alone", {"merge": "E5401", "continue": "E5401"}),
]
"""Finding, base, option of PEFT, and what each action ends in."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Base → its directory and a plain adapter of it, each made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = matrix.made_base(name, tmp_path_factory.mktemp("base"))
        return made[name]

    return get


@pytest.mark.parametrize(("finding", "base", "option", "expected"), CASES, ids=lambda value: str(value)[:24])
def test_an_adapter_is_what_was_trained_or_an_error_by_name(bases, tmp_path, finding, base, option, expected):
    place, plain = bases(base)
    with matrix.quiet():
        found = matrix.tried(base, place, matrix.OPTIONS[option], plain, tmp_path, expected)
    said = {action: (kind if kind != "error" else detail[:5]) for action, (kind, detail) in found.items()}
    assert said == expected, f"{finding}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("base", matrix.BASES)
def test_no_option_of_peft_becomes_another_model(tmp_path, base):
    with matrix.quiet():
        found = list(matrix.cases([base], [], tmp_path))
    assert [case for case in found if case["outcome"] == "wrong"] == []
    assert sum(case["outcome"] == "equal" for case in found) > len(found) / 3


def test_r1_the_certificate_compares_with_the_sum_of_the_adapters_own_files(bases, tmp_path):
    """A combined adapter that is √r too strong, as PEFT 0.21.2 makes it of rsLoRA, does not pass."""
    place, plain = bases("llama")
    with matrix.quiet():
        strong = matrix.train("llama", place, matrix.OPTIONS["rslora"], tmp_path / "rs")
        combined = AdapterCombination("cat", ((strong.adapter, 1.0), (plain.adapter, 0.5)))
        adapter = combine_adapters(LayerwiseModel(matrix.section_of(place), place, "cpu"), combined, tmp_path)
        settings = read_json(adapter / matrix.CONFIG)
        for key in ("lora_alpha", "alpha_pattern"):
            value = settings[key]
            settings[key] = 8**0.5 * value if key == "lora_alpha" else {k: 8**0.5 * v for k, v in value.items()}
        (adapter / matrix.CONFIG).write_text(json.dumps(settings))
        job = MergeJob(
            matrix.section_of(place), adapter, tmp_path / "merged", tmp_path / "certificate.json", combined=combined
        )
        with pytest.raises(GateError):
            merge_adapter_job(job, matrix.CPU, matrix.ROWS)
    failed = [check["name"] for check in read_json(tmp_path / "certificate.json")["checks"] if not check["passed"]]
    assert failed == ["merge_rounding"]


def test_r1_the_rounding_of_a_sum_is_measured_against_its_parts():
    one, other = (Update(torch.randn(2, 8), torch.randn(6, 2), scaling) for scaling in (2.0, -0.5))
    both = Update(torch.cat([one.a, other.a]), torch.cat([2.0 * one.b, -0.5 * other.b], dim=1), 1.0)
    base = torch.randn(6, 8)
    merged = base.clone()
    fold_update(merged, both)
    assert rounding_error(base, both, merged, [one, other]) <= 1
    assert rounding_error(base, both, merged, [one, dataclasses.replace(other, scaling=0.5)]) > 100


def test_every_setting_of_the_installed_peft_is_in_the_table():
    known = lora_settings.READ | lora_settings.TRAINING_ONLY | lora_settings.OTHER_ARITHMETIC.keys()
    assert {each.name for each in dataclasses.fields(LoraConfig)} <= known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = LoraConfig(task_type="CAUSAL_LM").to_dict()
    assert lora_settings.find_non_lora_setting(saved | {"peft_type": "LORA"}) is None


@pytest.mark.parametrize("value", ["loftq", "PiSSA", "nextinit", 3, []])
def test_r3_initialisations_are_an_error_whatever_their_spelling(value):
    problem = lora_settings.find_non_lora_setting({"peft_type": "LORA", "init_lora_weights": value})
    assert problem is not None
    assert problem.key == "init_lora_weights"


@pytest.mark.parametrize(
    "option",
    ["names of torch.compile", "names with the adapter's", "names of checkpointing", "names without PEFT's prefix",
     "a pickle alone"],
)  # fmt: skip
def test_r12_the_command_that_an_error_gives_makes_the_adapter_right(bases, tmp_path, option):
    place, plain = bases("llama")
    with matrix.quiet():
        saved = matrix.train("llama", place, matrix.OPTIONS[option], tmp_path / "adapter of mine", seed=1)
        with pytest.raises(SureFitError) as caught:
            matrix.merged(place, saved.adapter, tmp_path / "first")
        command = re.search(r"cd .*", caught.value.help)[0].replace("python -c", f"{sys.executable} -c")
        subprocess.run(["bash", "-c", command], check=True)
        assert load_file(saved.adapter / matrix.WEIGHTS).keys() == load_file(plain.adapter / matrix.WEIGHTS).keys()
        found = matrix.merged(place, saved.adapter, tmp_path / "second")
    torch.testing.assert_close(found, saved.logits, rtol=1e-3, atol=1e-3)


def test_r3_check_says_it_before_training(tmp_path):
    """From the two files of a PiSSA adapter and a config that goes on from it."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "init_lora_weights": "pissa",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "run.yaml").write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\n"
        "data: {train: surefit/function-calling-train, eval: surefit/function-calling-eval}\n"
        f"lora: {{r: 4, lora_alpha: 8, target_modules: [q_proj], start_from: {adapter}}}\noutput_dir: {tmp_path}/run\n"
    )
    found = surefit("check", tmp_path / "run.yaml", "--json")
    assert found.code == 1
    assert [(f["code"], f["field"]) for f in found.json["findings"] if f["severity"] == "error"] == [
        ("ADP005", "lora.start_from")
    ]


def test_r4_factors_that_peft_leaves_out_are_merged_where_the_settings_name_them(bases, tmp_path):
    """PEFT saves a head that it tied to GPT-2's embedding without its name in target_modules."""
    place, _ = bases("gpt2 tied")
    with matrix.quiet():
        saved = matrix.train("gpt2 tied", place, matrix.OPTIONS["factors of both, tied"], tmp_path / "adapter")
        with pytest.raises(GateError) as caught:
            matrix.merged(place, saved.adapter, tmp_path)
        assert caught.value.field == "target_modules"
        targets = read_json(saved.adapter / matrix.CONFIG)["target_modules"]
        assert "lm_head" not in targets
        matrix.setting(target_modules=[*targets, "lm_head"])(saved.adapter)
        found = matrix.merged(place, saved.adapter, tmp_path / "second")
    torch.testing.assert_close(found, saved.logits, rtol=1e-3, atol=1e-3)


def test_r8_a_head_of_another_shape_is_named(bases, tmp_path):
    place, _ = bases("llama")
    option = dataclasses.replace(
        matrix.OPTIONS["norms whole"],
        change=lambda directory: matrix.save_file(
            {k: (v[:-1].clone() if k.endswith("model.norm.weight") else v)
             for k, v in load_file(directory / matrix.WEIGHTS).items()},
            directory / matrix.WEIGHTS, metadata={"format": "pt"},
        ),
    )  # fmt: skip
    with matrix.quiet():
        saved = matrix.train("llama", place, option, tmp_path / "adapter")
        with pytest.raises(GateError, match=r"model\.norm\.weight has shape \(31,\) in the adapter, but \(32,\)"):
            matrix.merged(place, saved.adapter, tmp_path)


def test_r7_rows_that_are_not_in_the_adapter_are_counted(bases, tmp_path):
    place, _ = bases("llama")
    option = matrix.Option({"trainable_token_indices": {"embed_tokens": [96, 97]}}, resized=98)
    with matrix.quiet():
        saved = matrix.train("llama", place, option, tmp_path / "adapter")
        tensors = {k: v for k, v in load_file(saved.adapter / matrix.WEIGHTS).items() if "lm_head" not in k}
        matrix.save_file(tensors, saved.adapter / matrix.WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(GateError, match=r"98 tokens, but the base has 96; the rows of lm_head\.weight"):
            matrix.merged(place, saved.adapter, tmp_path)


@pytest.mark.parametrize(("tokens", "ends_in"), [(96, "equal"), (97, "equal"), (98, "E6401")])
def test_r7_a_token_without_a_row_in_the_base_too_is_not_missing(tmp_path, tokens, ends_in):
    """Gemma 3 1B's tokenizer has a token more than its vocabulary has rows, and every trainer saves it."""
    place, plain = matrix.made_base("llama", tmp_path)
    matrix.tokenizer_of(97).save_pretrained(place)
    matrix.tokenizer_of(tokens).save_pretrained(plain.adapter)
    with matrix.quiet():
        kind, detail = matrix.outcome(
            lambda: matrix.merged(place, plain.adapter, tmp_path / "out"), lambda: plain.logits
        )
    assert (kind if kind != "error" else detail[:5]) == ends_in, detail


@pytest.mark.parametrize(("tokens", "said"), [(96, False), (98, True)])
def test_r7_tokens_that_training_goes_on_without_are_said(tmp_path, tokens, said):
    place, plain = matrix.made_base("llama", tmp_path)
    matrix.tokenizer_of(tokens).save_pretrained(plain.adapter)
    section = matrix.section_of(place)
    fresh = LoraSection(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], start_from=str(plain.adapter)
    )
    with matrix.quiet():
        notes = load_initial_adapter(add_adapter(load_model(section, matrix.CPU), fresh), plain.adapter, section)
    assert any(re.search(r"\b98 tokens.*\b96\b", note) for note in notes) == said


def test_ways_that_are_no_sum_keep_each_adapters_scaling(bases, tmp_path):
    """Of adapters that differ only in how they say their scaling, every way makes the same."""
    place, plain = bases("llama")
    with matrix.quiet():
        other = matrix.train("llama", place, matrix.OPTIONS["plain"], tmp_path / "rs", seed=1)
        matrix.setting(use_rslora=True, lora_alpha=4)(other.adapter)  # 4 / √4 is 8 / 4
        base = LayerwiseModel(matrix.section_of(place), place, "cpu")
        for way in ("linear", "ties", "magnitude_prune", "svd", "cat"):
            made = []
            for number, path in enumerate((plain.adapter, other.adapter)):
                out = tmp_path / f"{way}{number}"
                out.mkdir()
                both = AdapterCombination(way, ((plain.adapter, 1.0), (path, -0.5)))
                made.append(load_file(combine_adapters(base, both, out) / matrix.WEIGHTS))
            assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items()), way


@pytest.mark.parametrize("weight", ["nan", "inf", "0", "half"])
def test_r1_a_weight_that_is_none_is_an_error(tmp_path, weight):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "surefit/nano"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    found = surefit("merge", adapter, "--with", f"{adapter}:{weight}", "--output", tmp_path / "out")
    assert found.code == 2
    assert f"{weight!r} is not a weight" in found.stderr


P = "base_model.model."


@pytest.mark.parametrize(
    ("names", "right"),
    [
        ([f"{P}q.lora_A.sft.weight", f"{P}q.lora_B.sft.weight"], f"{P}q.lora_A.weight"),
        ([f"{P}wte.lora_embedding_A.default"], f"{P}wte.lora_embedding_A"),
        ([f"module.{P}q.lora_A.weight"], f"{P}q.lora_A.weight"),
        ([f"{P}{P}q.lora_A.weight"], f"{P}q.lora_A.weight"),
        ([f"_orig_mod.{P}h.0._fsdp_wrapped_module.q.lora_A.default.weight"], f"{P}h.0.q.lora_A.weight"),
        (["q.lora_A.weight", f"{P}q.lora_B.weight"], f"{P}q.lora_A.weight"),
        ([f"{P}q.lora_A.a.weight", f"{P}q.lora_A.b.weight"], None),
    ],
)
def test_r12_names_that_peft_would_ignore(names, right):
    problem, expression = lora_settings.rename_problem(names)
    assert problem
    assert (eval(expression, {"k": names[0]}) if expression else None) == right


@pytest.mark.parametrize(
    "name",
    ["q.lora_A.weight", "q.lora_B.bias", "wte.lora_embedding_A", "q.lora_magnitude_vector", "q.base_layer.bias",
     "q.lora_magnitude_vector.weight", "wte.token_adapter.trainable_tokens_delta", "lm_head.modules_to_save.weight"],
)  # fmt: skip
def test_r12_names_that_peft_writes_are_right(name):
    assert lora_settings.rename_problem([f"{P}{name}"]) is None
