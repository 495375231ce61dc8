"""The closed form against the simulation, which runs the training step itself on tensors without data."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
from replay import replay_allocations
from transformers import AutoConfig, PretrainedConfig

from surefit.config.capabilities import BITSANDBYTES
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.facts.activations import LOSS_TILE, chunk_rows
from surefit.facts.memory_formula import fullest_moment_bytes, peak_bytes_on_one
from surefit.facts.model import ModelFacts, build_facts, catalogue, model_facts
from surefit.plan.build_plan import closed_form_disagreement
from surefit.plan.simulate import record_training, simulate_memory
from surefit.plan.step_config import StepConfig

NAMES = {
    "qwen2-0.5b": "Qwen/Qwen2.5-0.5B-Instruct", "qwen2-7b": "Qwen/Qwen2.5-7B", "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B", "llama2-7b": "meta-llama/Llama-2-7b-hf", "llama3-1b": "meta-llama/Llama-3.2-1B",
    "llama3-3b": "meta-llama/Llama-3.2-3B", "llama3-8b": "meta-llama/Llama-3.1-8B",
}  # fmt: skip
TINY = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip

SLOW = pytest.mark.slow


def shape_of(name: str, **changes: Any) -> tuple[PretrainedConfig, ModelFacts]:
    """A model of the catalogue, as transformers and as the facts describe it."""
    shape = copy.deepcopy(catalogue()[NAMES[name]]["config"]) | changes
    facts = build_facts(NAMES[name], shape, None, where=name, source="catalogue")
    return AutoConfig.for_model(shape.pop("model_type"), **shape), facts


def both(
    shape: tuple[PretrainedConfig, ModelFacts],
    kind: str = "lora",
    r: int = 8,
    rows: int = 1,
    length: int = 1024,
    dtype: str = "bfloat16",
    padded: bool = False,
    micro_batches: int = 1,
    target_modules: Any = "all-linear",
    dropout: float = 0.0,
    checkpointing: Any = False,
    packed: bool = False,
    chunked: bool = True,
    fused_lora: bool = False,
    tiled_mlp: bool = False,
    quantization: str = "none",
    optimizer: str = "adamw_torch",
    capability: tuple[int, int] = (8, 0),
    kernels: bool = False,
) -> tuple[int, int]:
    """(closed form, simulated) bytes of the fullest moment of a step."""
    lora = {"r": r, "target_modules": target_modules, "lora_dropout": dropout}
    resolved = resolved_run(
        lora, rows, length, dtype, checkpointing, micro_batches,
        model={"quantization": quantization}, data={"packing": packed}, train={"method": kind, "optim": optimizer},
        speed={"chunked_loss": chunked, "fused_lora": fused_lora, "tiled_mlp": tiled_mlp, "kernels": kernels},
    )  # fmt: skip
    setting = StepConfig(
        shape[0], dtype, resolved.config.adapter, rows, length, padded, micro_batches=micro_batches,
        checkpointing=checkpointing, packed=packed, chunked=chunked, fused_lora=fused_lora, tiled_mlp=tiled_mlp,
        quantization=quantization, optimizer=optimizer, capability=capability, kernels=kernels,
    )  # fmt: skip
    budget = peak_bytes_on_one(resolved, shape[1], padded=padded, capability=capability)
    assert budget is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if shape[0].num_hidden_layers > 3:
            phases = {phase.name: phase.allocated for phase in simulate_memory(setting).phases}
            return budget.phases["step"], phases["step"]
        trace = record_training(setting)  # its fullest moment is the step's: what follows holds less
    return budget.phases["step"], replay_allocations(trace.events, trace.sizes).peak_allocated


def resolved_run(
    lora: dict[str, Any], rows: int, length: int, dtype: str, checkpointing: Any, micro_batches: int,
    **sections: dict[str, Any],
) -> ResolvedConfig:  # fmt: skip
    tree: dict[str, Any] = {
        "model": {"name_or_path": "unused", "dtype": dtype},
        "lora": lora,
        "data": {"train": "unused", "max_length": length},
        "train": {
            "global_batch_size": rows * micro_batches,
            "per_device_train_batch_size": rows,
            "gradient_checkpointing": checkpointing,
        },
        "speed": {},
        "output_dir": "unused",
    }
    for name, values in sections.items():
        tree[name] |= values
    return ResolvedConfig(SureFitConfig.model_validate(tree), {}, micro_batches, None)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("llama3-8b", {"length": 2048}),
    ],
)
def test_at_its_whole_depth(name: str, run: dict[str, Any]) -> None:
    closed, simulated = both(shape_of(name), **run)
    assert closed == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("qwen2-0.5b", {"rows": 8, "length": 512, "padded": True, "r": 64}),
        pytest.param("llama3-1b", {"rows": 4, "length": 512, "padded": True, "dropout": 0.05}, marks=SLOW),
        ("llama3-1b", {"kind": "full", "dtype": "float32", "length": 512, "micro_batches": 4}),
        ("llama3-3b", {"kind": "full", "rows": 2, "checkpointing": True}),
        pytest.param(
            "qwen2-7b", {"kind": "full", "rows": 4, "length": 512, "padded": True, "micro_batches": 2}, marks=SLOW
        ),
        pytest.param("llama2-7b", {"dtype": "float32", "rows": 8, "length": 512}, marks=SLOW),
        ("qwen3-4b", {"dtype": "float32", "rows": 2, "length": 2048, "padded": True, "checkpointing": True}),
        pytest.param("llama3-1b", {"length": 2048, "chunked": False}, marks=SLOW),
        pytest.param(
            "qwen3-0.6b", {"kind": "full", "length": 2048, "chunked": False, "checkpointing": True}, marks=SLOW
        ),
        pytest.param("llama3-1b", {"packed": True, "rows": 4, "fused_lora": True, "dropout": 0.1}, marks=SLOW),
        ("llama3-1b", {"packed": True, "length": 4096, "fused_lora": True, "checkpointing": "selective"}),
        ("qwen3-0.6b", {"packed": True, "rows": 4, "dtype": "float16", "capability": (7, 5), "fused_lora": True}),
        pytest.param(
            "llama3-3b",
            {"packed": True, "kind": "full", "optimizer": "paged_adamw_32bit", "checkpointing": True},
            marks=SLOW,
        ),
    ],
)
def test_of_three_layers(name: str, run: dict[str, Any]) -> None:
    """Where the gradients and the update compete with the loss, which of them is the fullest depends on the depth."""
    closed, simulated = both(shape_of(name, num_hidden_layers=3), **run)
    assert closed == pytest.approx(simulated, rel=0.005)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param({"quantization": "nf4", "length": 512, "checkpointing": True, "fused_lora": True}, marks=SLOW),
        {"quantization": "nf4", "length": 4096, "fused_lora": True},
    ],
)
def test_with_bitsandbytes(run: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    closed, simulated = both(shape_of("qwen3-0.6b", num_hidden_layers=3), packed=True, **run)
    assert closed == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param({"optimizer": "adamw_8bit"}, marks=SLOW),
        {"optimizer": "paged_adamw_8bit", "dtype": "float32"},
    ],
)
def test_with_another_optimizer(run: dict[str, Any]) -> None:
    if run["optimizer"] in BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    run = {"kind": "full"} | run
    closed, simulated = both(shape_of("qwen3-0.6b", num_hidden_layers=3), packed=True, **run)
    assert closed == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    "run",
    [
        {"checkpointing": "offload", "length": 8192},
        pytest.param({"checkpointing": True, "tiled_mlp": True, "length": 32768}, marks=SLOW),
        {"quantization": "fp8", "capability": (9, 0), "checkpointing": True, "length": 4096},
    ],
)
def test_what_the_closed_form_knows_less_exactly(run: dict[str, Any]) -> None:
    closed, simulated = both(shape_of("llama3-1b", num_hidden_layers=3), packed=True, fused_lora=True, **run)
    assert closed == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("qwen3-0.6b", {"length": 2048}),
        pytest.param("qwen2-0.5b", {"rows": 2, "length": 2048, "padded": True}, marks=SLOW),
        pytest.param("llama3-1b", {"rows": 2, "length": 2048, "checkpointing": True}, marks=SLOW),
        ("qwen3-0.6b", {"packed": True, "rows": 4, "length": 1024}),
    ],
)
def test_the_kernel_that_holds_all_logits(name: str, run: dict[str, Any]) -> None:
    """bfloat16 on Turing: most of what is held grows with the square of the length."""
    closed, simulated = both(shape_of(name, num_hidden_layers=3), capability=(7, 5), **run)
    assert closed == pytest.approx(simulated, rel=0.015)
    efficient, _ = both(shape_of(name, num_hidden_layers=3), capability=(7, 5), **run | {"dtype": "float16"})
    assert closed > 1.25 * efficient


@pytest.mark.parametrize(
    "run",
    [
        {"length": 4096},
        {"length": 4096, "checkpointing": True},
        pytest.param({"kind": "full", "length": 8192}, marks=SLOW),
        {"kind": "full", "length": 8192, "dtype": "float32", "checkpointing": True},
        {"target_modules": ["q_proj", "v_proj"], "length": 4096, "checkpointing": True},
    ],
)
def test_a_small_vocabulary_leaves_the_peak_to_the_layers(run: dict[str, Any]) -> None:
    closed, simulated = both(shape_of("llama3-8b", num_hidden_layers=3, vocab_size=512), **run)
    assert closed == pytest.approx(simulated, rel=0.003)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("qwen3-4b", {"length": 4096}),
        ("llama3-1b", {"length": 4096, "fused_lora": True, "r": 64}),
        pytest.param("llama3-1b", {"length": 4096, "fused_lora": True, "r": 256}, marks=SLOW),
        pytest.param("llama3-1b", {"length": 4096, "fused_lora": True, "dropout": 0.1}, marks=SLOW),
        pytest.param(
            "llama3-1b", {"length": 4096, "fused_lora": True, "target_modules": ["q_proj", "v_proj"]}, marks=SLOW
        ),
        ("qwen3-0.6b", {"length": 8192, "fused_lora": True, "checkpointing": True}),
        pytest.param(
            "llama3-1b",
            {"length": 16384, "fused_lora": True, "checkpointing": "selective", "tiled_mlp": True},
            marks=SLOW,
        ),
        ("llama3-1b", {"length": 8192, "kind": "full"}),
        pytest.param(
            "llama3-1b", {"length": 8192, "kind": "full", "dtype": "float32", "checkpointing": True}, marks=SLOW
        ),
        pytest.param("qwen3-0.6b", {"rows": 4, "padded": True, "packed": False}, marks=SLOW),
    ],
)
def test_with_fused_kernels(name: str, run: dict[str, Any]) -> None:
    """A small vocabulary leaves the peak to the layers, where the kernels are."""
    run = {"packed": True} | run
    shape = shape_of(name, num_hidden_layers=3, vocab_size=512)
    closed, simulated = both(shape, kernels=True, **run)
    assert closed == pytest.approx(simulated, rel=0.005)
    without, _ = both(shape, **run)
    assert closed < 0.97 * without


def test_mlps_without_silu_have_no_kernel() -> None:
    shape = shape_of("llama3-1b", num_hidden_layers=3, vocab_size=512, hidden_act="gelu")
    closed, simulated = both(shape, length=4096, packed=True, fused_lora=True, kernels=True)
    assert closed == pytest.approx(simulated, rel=0.005)
    assert (
        closed
        > 1.05
        * both(
            shape_of("llama3-1b", num_hidden_layers=3, vocab_size=512),
            length=4096,
            packed=True,
            fused_lora=True,
            kernels=True,
        )[0]
    )


@pytest.mark.parametrize(
    ("architecture", "model_type", "kind"),
    [("MistralForCausalLM", "mistral", "lora"), ("SmolLM3ForCausalLM", "smollm3", "full")],
)
def test_architectures_that_are_not_in_the_catalogue(architecture: str, model_type: str, kind: str) -> None:
    config = TINY | {"architectures": [architecture]}
    facts = build_facts(architecture, config, None, where=architecture, source="catalogue")
    shape = AutoConfig.for_model(model_type, **TINY, pad_token_id=0, sliding_window=None)
    closed, simulated = both((shape, facts), kind=kind, length=8192)
    assert closed == pytest.approx(simulated, rel=0.01)


def test_other_architectures_are_not_guessed() -> None:
    run = resolved_run({"r": 8}, 1, 1024, "bfloat16", False, 1)
    facts = model_facts(NAMES["llama3-1b"])
    assert peak_bytes_on_one(run, replace(facts, architecture="Gemma2ForCausalLM")) is None
    assert peak_bytes_on_one(run, replace(facts, parameters=None, linear_modules={})) is None


def test_the_worked_example() -> None:
    run = resolved_run({"r": 8}, 1, 2048, "bfloat16", False, 1)
    budget = peak_bytes_on_one(run, model_facts(NAMES["llama3-8b"]))
    assert budget is not None
    terms = {term.term: term.bytes for term in budget.terms}
    assert terms["activations"] / 2048 == pytest.approx(5_906_688, rel=1e-6)
    states, rows = 2 * 2 * 2047 * 4096, chunk_rows(2047, 128_256, 2)
    assert rows == 2047
    assert terms["logits"] == states + (2 * rows + 4 * LOSS_TILE) * 128_256
    assert terms["backward pass"] == terms["activations"] + 20 * 4096 * 2048, "of the final norm"
    assert budget.phases["step"] == fullest_moment_bytes(budget.terms) == budget.allocated
    assert budget.phases["load"] < budget.phases["eval"] < budget.phases["step"]


def test_padding_is_assumed_for_more_than_one_row() -> None:
    facts = model_facts(NAMES["llama3-1b"])
    many = resolved_run({"r": 8}, 4, 1024, "bfloat16", False, 1)
    assert peak_bytes_on_one(many, facts) == peak_bytes_on_one(many, facts, padded=True)
    one = resolved_run({"r": 8}, 1, 1024, "bfloat16", False, 1)
    assert peak_bytes_on_one(one, facts) == peak_bytes_on_one(one, facts, padded=False)
    assert peak_bytes_on_one(one, facts, length=512) != peak_bytes_on_one(one, facts)


def test_a_disagreement_over_three_percent_is_said() -> None:
    assert closed_form_disagreement(1029, 1000) is None
    assert closed_form_disagreement(971, 1000) is None
    said = closed_form_disagreement(10 << 30, 11 << 30)
    assert said is not None
    for part in ("10.00 GiB", "11.00 GiB", "-9.1%"):
        assert part in said
