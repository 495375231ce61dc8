"""PEFT's adapter options × bases × (merge, combine, continue), each against the logits of the model that PEFT trained.

PYTHONPATH=src python benchmarks/adapter_matrix.py [--json FILE] [--only TEXT ...] [--bases NAME ...]

Tiny random models, their weights nudged where an adapter trains them, saved by PEFT and opened by SureFit. A case ends
in one of three ways: equal (the logits are those of the trained model), error (by name, before anything is written), or
wrong (SureFit made a model that answers otherwise, or failed without a message of its own). The exit code is 1 where
one is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, LoraGAConfig, MontecloraConfig, VeloraConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import SureFitError
from surefit.core.rundir import read_json, write_json
from surefit.merge.combine import AdapterCombination, combine_adapters
from surefit.merge.merge import MergeJob, merge_adapter_job
from surefit.model.adapter import add_adapter, load_initial_adapter
from surefit.model.layerwise_forward import LayerwiseModel
from surefit.model.load import load_model

VOCABULARY, MORE = 96, 98
IDS = torch.randint(5, 90, (4, 16), generator=torch.Generator().manual_seed(1))
ROWS = IDS.tolist()
CPU: Any = SimpleNamespace(kind="cpu")
CLOSE = 1e-3
"""Share of the logits' standard deviation that float32 rounding stays far below."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ACTIONS = ("merge", "option + plain", "plain + option", "continue")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2 with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "gpt2 tied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2,
                   bos_token_id=1, eos_token_id=2)
    ),
}  # fmt: skip
NAMES = {"gpt2 tied": ("c_attn", "c_fc", "wte", "ln_f")}
"""Base → two layers, the embedding and the last norm."""

Changed = Callable[[Path], None]


@dataclass(frozen=True)
class Option:
    """A way to configure, train and save an adapter with PEFT.

    Attributes:
        settings: of LoraConfig; `{q}`, `{v}`, `{embed}`, `{norm}` stand for the base's names.
        resized: the rows that the vocabulary is resized to before.
        converted: saved with path_initial_model_for_weight_conversion.
        change: what is done to the saved directory.
        needs: "gradients" or "covariance" for an initialization from data.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    resized: int | None = None
    converted: bool = False
    change: Changed | None = None
    needs: str | None = None


def rename(to: Callable[[str], str]) -> Changed:
    """Write the tensors under other names."""

    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        save_file({to(k): v.clone() for k, v in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})

    return change


def tensors_kept(kept: Callable[[str], bool], emptied: bool = False) -> Changed:
    """Take tensors out of the file, or their values."""

    def change(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        left = {k: v for k, v in tensors.items() if kept(k)}
        if emptied:
            left |= {k: torch.empty(0) for k in tensors if not kept(k)}
        save_file(left, directory / WEIGHTS, metadata={"format": "pt"})

    return change


def setting(**values: Any) -> Changed:
    """Write other settings into adapter_config.json."""
    return lambda directory: write_json(directory / CONFIG, read_json(directory / CONFIG) | values)


def pickled(directory: Path) -> None:
    """Save as older PEFT did."""
    torch.save(load_file(directory / WEIGHTS), directory / "adapter_model.bin")
    (directory / WEIGHTS).unlink()


PATTERNS = {"rank_pattern": {"{v}": 2}, "alpha_pattern": {"{q}": 4}}
OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "all-linear": Option({"target_modules": "all-linear"}),
    "regular expression": Option({"target_modules": r".*\.({q}|{v})"}),
    "layers_to_transform": Option({"layers_to_transform": [1]}),
    "exclude_modules": Option({"exclude_modules": r".*\.0\..*{v}"}),
    "fan_in_fan_out": Option({"fan_in_fan_out": True}),
    "lora_dropout": Option({"lora_dropout": 0.5}),
    "rslora": Option({"use_rslora": True}),
    "dora": Option({"use_dora": True}),
    "dora + rslora": Option({"use_dora": True, "use_rslora": True}),
    "patterns": Option(PATTERNS),
    "patterns + rslora": Option(PATTERNS | {"use_rslora": True}),
    "lora_bias": Option({"lora_bias": True}),
    "bias lora_only": Option({"bias": "lora_only"}),
    "bias all": Option({"bias": "all"}),
    "bias dropped by PEFT 0.19": Option({"bias": "lora_only"}, change=tensors_kept(lambda k: not k.endswith(".bias"))),
    "gaussian": Option({"init_lora_weights": "gaussian"}),
    "orthogonal": Option({"init_lora_weights": "orthogonal"}),
    "random": Option({"init_lora_weights": False}),
    "eva": Option({"init_lora_weights": "eva"}),
    "mica": Option({"init_lora_weights": "mica"}),
    "pissa": Option({"init_lora_weights": "pissa"}),
    "pissa_niter_4": Option({"init_lora_weights": "pissa_niter_4"}),
    "olora": Option({"init_lora_weights": "olora"}),
    "corda": Option({"init_lora_weights": "corda"}, needs="covariance"),
    "lora_ga": Option({"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}, needs="gradients"),
    "loftq": Option({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 8, "loftq_iter": 1}}),
    "pissa converted": Option({"init_lora_weights": "pissa"}, converted=True),
    "pissa + rslora converted": Option({"init_lora_weights": "pissa", "use_rslora": True}, converted=True),
    "olora converted": Option({"init_lora_weights": "olora"}, converted=True),
    "corda converted": Option({"init_lora_weights": "corda"}, converted=True, needs="covariance"),
    "lora_ga converted": Option({"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}, converted=True,
                                needs="gradients"),
    "head whole": Option({"modules_to_save": ["lm_head"]}),
    "embedding whole": Option({"modules_to_save": ["{embed}"]}),
    "embedding and head whole": Option({"modules_to_save": ["{embed}", "lm_head"]}),
    "embedding whole, tied": Option({"modules_to_save": ["{embed}"], "ensure_weight_tying": True}),
    "norms whole": Option({"modules_to_save": ["{norm}"]}),
    "whole modules lost": Option({"modules_to_save": ["lm_head"]}, change=tensors_kept(lambda k: "lora_" in k)),
    "factors of the embedding": Option({"target_modules": ["{q}", "{embed}"]}),
    "factors of the head": Option({"target_modules": ["{q}", "lm_head"]}),
    "factors of both": Option({"target_modules": ["{q}", "{embed}", "lm_head"]}),
    "factors of both, tied": Option({"target_modules": ["{q}", "{embed}", "lm_head"], "ensure_weight_tying": True}),
    "dora of the embedding": Option({"target_modules": ["{q}", "{embed}"], "use_dora": True}),
    "factors of the embedding, head whole": Option({"target_modules": ["{q}", "{embed}"],
                                                    "modules_to_save": ["lm_head"]}),
    "token rows": Option({"trainable_token_indices": {"{embed}": [3, 7]}}),
    "token rows, a list": Option({"trainable_token_indices": [3, 7]}),
    "token rows of both": Option({"trainable_token_indices": {"{embed}": [3, 7], "lm_head": [3, 7]}}),
    "token rows, factors of the head": Option({"target_modules": ["{q}", "lm_head"],
                                               "trainable_token_indices": [3, 7]}),
    "resized": Option(resized=MORE),
    "resized, both whole": Option({"modules_to_save": ["{embed}", "lm_head"]}, resized=MORE),
    "resized, embedding whole": Option({"modules_to_save": ["{embed}"]}, resized=MORE),
    "resized, embedding whole, tied": Option({"modules_to_save": ["{embed}"], "ensure_weight_tying": True},
                                             resized=MORE),
    "resized, token rows": Option({"trainable_token_indices": {"{embed}": [96, 97]}}, resized=MORE),
    "resized to fewer": Option(resized=93),
    "resized, embeddings not saved": Option(resized=MORE, change=tensors_kept(lambda k: "lora_" in k)),
    "layer_replication": Option({"layer_replication": [(0, 2), (1, 2)]}),
    "alora": Option({"alora_invocation_tokens": [5, 6]}),
    "bdlora": Option({"use_bdlora": BdLoraConfig(target_modules_bd_a=["{v}"], target_modules_bd_b=["{q}"], nblocks=2)}),
    "kasa": Option({"kasa_config": KasaConfig()}),
    "velora": Option({"velora_config": VeloraConfig(num_groups=4)}),
    "monteclora": Option({"monteclora_config": MontecloraConfig()}),
    "a setting of a newer PEFT": Option(change=setting(use_nextlora=True)),
    "a setting of a newer PEFT, off": Option(change=setting(use_nextlora=False, nextlora_config=None)),
    "an initialization of a newer PEFT": Option(change=setting(init_lora_weights="nextinit")),
    "another kind": Option(change=setting(peft_type="LOHA")),
    "names of torch.compile": Option(change=rename(lambda k: f"_orig_mod.{k}")),
    "names with the adapter's": Option(change=rename(lambda k: k.replace(".weight", ".default.weight"))),
    "names of checkpointing": Option(change=rename(lambda k: k.replace(".lora", "._checkpoint_wrapped_module.lora"))),
    "names without PEFT's prefix": Option(change=rename(lambda k: k.removeprefix("base_model.model."))),
    "emptied by ZeRO-3": Option(change=tensors_kept(lambda k: False, emptied=True)),
    "one tensor emptied": Option(change=tensors_kept(lambda k: ".1." not in k or "lora_B" not in k, emptied=True)),
    "head emptied": Option({"modules_to_save": ["lm_head"]},
                           change=tensors_kept(lambda k: "lm_head" not in k, emptied=True)),
    "a pickle alone": Option(change=pickled),
}  # fmt: skip


def in_words_of(base: str, value: Any) -> Any:
    """Settings with the base's names for `{q}` and the others."""
    q, v, embed, norm = NAMES.get(base, ("q_proj", "v_proj", "embed_tokens", "norm"))
    match value:
        case str():
            for mark, name in (("{q}", q), ("{v}", v), ("{embed}", embed), ("{norm}", norm)):
                value = value.replace(mark, name)
            return value
        case dict():
            return {in_words_of(base, k): in_words_of(base, each) for k, each in value.items()}
        case list():
            return [in_words_of(base, each) for each in value]
        case BdLoraConfig():
            return BdLoraConfig(
                in_words_of(base, value.target_modules_bd_a),
                in_words_of(base, value.target_modules_bd_b),
                value.nblocks,
            )
    return value


@dataclass(frozen=True)
class Saved:
    """A trained adapter: its directory, and the logits of the model that was trained."""

    adapter: Path
    logits: torch.Tensor


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    words = models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t2")


def load(place: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    return model


def train(base: str, place: Path, option: Option, adapter: Path, seed: int = 0) -> Saved:
    """Configure an adapter, move everything that it trains by noise, and save it, all with PEFT."""
    torch.manual_seed(seed)
    model = load(place)
    if option.resized is not None:
        model.resize_token_embeddings(option.resized, mean_resizing=False)
    q, v, _, _ = NAMES.get(base, ("q_proj", "v_proj", "", ""))
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": [q, v], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**(settings | in_words_of(base, copy.deepcopy(option.settings))))
    if option.needs == "gradients":
        preprocess_loraga(model, config, lambda: model(IDS, labels=IDS).loss.backward())
    elif option.needs == "covariance":
        preprocess_corda(model, config, run_model=lambda: [model(row[None]) for row in IDS])
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    kind = config.init_lora_weights
    if option.converted:
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(adapter / "initial")
        adapted.peft_config["default"].init_lora_weights = kind
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    initial = {"path_initial_model_for_weight_conversion": str(adapter / "initial")} if option.converted else {}
    adapted.save_pretrained(adapter, **initial)
    with torch.no_grad():
        logits = adapted.eval()(IDS).logits
    if option.resized is not None:
        tokenizer_of(option.resized).save_pretrained(adapter)
    if option.change is not None:
        option.change(adapter)
    return Saved(adapter, logits)


def section_of(place: Path) -> ModelSection:
    return ModelSection(name_or_path=str(place), dtype="float32")


def merged(place: Path, adapter: Path, out: Path, combined: AdapterCombination | None = None) -> torch.Tensor:
    """The logits of what SureFit merges."""
    out.mkdir(exist_ok=True)
    if combined is not None:
        adapter = combine_adapters(LayerwiseModel(section_of(place), place, "cpu"), combined, out)
    tokenizer = str(adapter) if (adapter / "tokenizer_config.json").exists() else None
    files = (out / "merged", out / "certificate.json")
    job = MergeJob(section_of(place), adapter, *files, tokenizer=tokenizer, combined=combined)
    merge_adapter_job(job, CPU, ROWS)
    with torch.no_grad():
        return load(out / "merged").eval()(IDS).logits


def both_active(place: Path, parts: tuple[tuple[Path, float], ...]) -> torch.Tensor:
    """PEFT's logits with several adapters active at once, each of them by its weight."""
    model: Any = None
    names = [f"adapter{number}" for number in range(len(parts))]
    for name, (path, _) in zip(names, parts, strict=True):
        if model is None:
            model = PeftModel.from_pretrained(load(place), str(path), name, autocast_adapter_dtype=False)
        else:
            model.load_adapter(str(path), name, autocast_adapter_dtype=False)
    model.base_model.set_adapter(names)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, (_, weight) in zip(names, parts, strict=True):
                if name in layer.scaling:
                    layer.scaling[name] *= weight
    with torch.no_grad():
        return model.eval()(IDS).logits  # type: ignore[no-any-return]


def continued(place: Path, adapter: Path) -> torch.Tensor:
    """The logits of the model that `lora.start_from` would go on from."""
    config = read_json(adapter / CONFIG)
    targets = config["target_modules"]
    section = LoraSection(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        lora_dropout=0.0,
        target_modules="all-linear" if isinstance(targets, str) else targets,
        use_rslora=config["use_rslora"],
        use_dora=config["use_dora"],
        start_from=str(adapter),
    )
    model: Any = add_adapter(load_model(section_of(place), CPU), section)
    load_initial_adapter(model, adapter, section_of(place))
    with torch.no_grad():
        return model.eval()(IDS).logits  # type: ignore[no-any-return]


def outcome(made: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor]) -> tuple[str, str]:
    """(equal, error or wrong; the code, the difference or the exception)."""
    try:
        found = made()
    except SureFitError as error:
        # A certificate that fails by its logits says "do not use these weights" of a sound adapter.
        return ("wrong" if "reloaded_" in error.message else "error"), f"{error.code} {error.message[:160]}"
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {str(error)[:160]}"
    wanted = expected()
    if found.shape != wanted.shape:
        return "wrong", f"logits of shape {tuple(found.shape)} where {tuple(wanted.shape)} was trained"
    difference = float((found - wanted).abs().max() / wanted.std())
    return ("equal" if difference <= CLOSE else "wrong"), f"{difference:.1e}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        disable_progress_bar()
        yield
        logging.disable(logging.NOTSET)


def made_base(name: str, folder: Path) -> tuple[Path, Saved]:
    """Write a base with a tokenizer, and a plain adapter of it."""
    place = folder / "base"
    torch.manual_seed(0)
    BASES[name]().save_pretrained(place)
    tokenizer_of(VOCABULARY).save_pretrained(place)
    return place, train(name, place, OPTIONS["plain"], folder / "plain", seed=1)


def cases(bases: list[str], only: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """Run every case; yields base, option, action, outcome and detail."""
    for number, base in enumerate(bases):
        place, plain = made_base(base, folder / str(number))
        for name in only or OPTIONS:
            at = folder / str(number) / name
            for action, (kind, detail) in tried(base, place, OPTIONS[name], plain, at).items():
                yield {"base": base, "option": name, "action": action, "outcome": kind, "detail": detail}


def tried(
    base: str, place: Path, option: Option, plain: Saved, at: Path, actions: Iterable[str] = ACTIONS
) -> dict[str, tuple[str, str]]:
    """Return action → outcome and detail, of one option over one base."""
    try:
        saved = train(base, place, option, at / "adapter")
    except Exception as error:
        return {"save": ("PEFT", str(error)[:160])}
    first = ((saved.adapter, 1.0), (plain.adapter, 0.5))
    second = ((plain.adapter, 1.0), (saved.adapter, -0.7))
    one, other = (AdapterCombination("cat", parts) for parts in (first, second))
    todo = {
        "merge": (partial(merged, place, saved.adapter, at), lambda: saved.logits),
        "option + plain": (partial(merged, place, Path(), at / "first", one), partial(both_active, place, first)),
        "plain + option": (partial(merged, place, Path(), at / "second", other), partial(both_active, place, second)),
        # Training has the vocabulary of its config.
        "continue": (partial(continued, place, saved.adapter), lambda: saved.logits[..., :VOCABULARY]),
    }
    return {action: outcome(*todo[action]) for action in actions}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=OPTIONS)
    parser.add_argument("--bases", nargs="*", default=list(BASES), choices=BASES)
    asked = parser.parse_args()
    with quiet(), tempfile.TemporaryDirectory() as folder:
        found = list(cases(asked.bases, asked.only, Path(folder)))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    counts = Counter((case["action"], case["outcome"]) for case in found)
    for action in ACTIONS:
        tally = {kind: counts[action, kind] for kind in ("equal", "error", "wrong")}
        print(f"{action:16} {tally['equal']:4} equal  {tally['error']:4} error by name  {tally['wrong']:4} wrong")
    print(f"{counts['save', 'PEFT']} that PEFT itself does not make of such a base")
    wrong = [case for case in found if case["outcome"] == "wrong"]
    for case in wrong:
        print(f"WRONG {case['base']} | {case['option']} | {case['action']}: {case['detail']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
