"""MOD: starting points of a run: base weights stored in fewer bits, and adapters to continue from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.core.reading import read_json_file
from surefit.core.units import bytes_text
from surefit.facts.low_bits import METHODS
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.adapter import STORED_QUANTIZED, adapter_config

NAME = "model.name_or_path"


@rule("MOD015", "stored-form-not-read", severity="error", suppressible=False)
def stored_form_not_read(config: SureFitConfig, model: ModelFacts, setup: Setup) -> Iterator[Finding]:
    """The base model's weights are stored in a format that SureFit does not read.

    ## What it does
    Looks, in SureFit's own config, at `quantization_config` in the model's config.json and at the headers of its weight
    files. FP8 with float scales (`fp8`, `compressed-tensors`) and MXFP4 are dequantized if the model's files are on
    this machine; for bitsandbytes, GPTQ and AWQ, see MOD012.

    ## Why it is bad
    Such files hold packed numbers and scales instead of matrices. Training would stop at loading, or continue with
    layers that an adapter cannot be merged into.

    ## Example
    DeepSeek-V4 as published: experts packed in FP4, with scales that are powers of two.

    ## Fix
    Use a bfloat16 copy of the model. If the model is in FP8 or MXFP4 and named by its hub id, download it first: `hf
    download NAME`.

    ## Evidence
    transformers 5.23 loads FP8 with blocks that do not divide a matrix (DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows
    in blocks of 128) with "We encountered some issues during automatic conversion of the weights".
    """
    method = model.quantization
    if setup.tool != "surefit" or method is None or method in STORED_QUANTIZED:
        return
    if model.source == "local" and not model.has_weights:  # MOD002 reports it
        return
    absent = model.source in ("hub", "catalogue") or (model.source == "cache" and not model.has_weights)
    problem, advice = f"has quantized files ({method}), which SureFit does not read", "use a bfloat16 copy of it"
    if model.unreadable is not None:
        problem = f"is stored in {method}, and cannot be dequantized: {model.unreadable}"
    elif absent and method in METHODS:
        problem = f"is stored in {method} and can be dequantized only after it has been downloaded"
        advice = f"hf download {config.model.name_or_path}"
    yield Finding(field=NAME, message=f"{model.name} {problem}", help=advice)


@rule("MOD016", "base-dequantized-first", severity="info")
def base_dequantised_first(config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """The base model is stored in FP8 or MXFP4, and is dequantized before loading.

    ## What it does
    Reports the size of the model that training loads: the files are dequantized once, into SureFit's cache.

    ## Why it is bad
    It is only a note: in memory the model needs twice the size of FP8 files, or four times that of MXFP4 files, and the
    merged model has that size too.

    ## Example
    A directory with Qwen3-8B-FP8: 9 GB of files, 16 GB of bfloat16 in memory.

    ## Fix
    None is needed. `model.quantization: fp8` or `nf4` stores the frozen weights in fewer bits again. The environment
    variable `SUREFIT_CACHE` sets the directory of the copy.

    ## Evidence
    tests/unit/model/test_low_bits.py: FP8 is number × scale, rounded once; MXFP4 is what transformers computes from the
    same files, bit for bit.
    """
    if model.dequantized_from is None or model.weight_bytes is None:
        return
    # Only linear layers are quantized, and stacked experts are none.
    size = f"{bytes_text(model.weight_bytes)} of {model.dtype}"
    can_quantize = config.train.method == "lora" and config.model.quantization == "none" and not model.expert_stacks
    yield Finding(
        field=NAME,
        message=f"{model.name} is stored in {model.dequantized_from}: SureFit dequantizes it once, "
        f"into {size} in its cache, and loads that",
        help="model.quantization: fp8 or nf4 stores them in fewer bits" if can_quantize else None,
    )


@rule("MOD017", "start-adapter-of-another-base", severity="warning")
def start_adapter_of_another_base(config: SureFitConfig) -> Iterator[Finding]:
    """The adapter to continue from was trained on a different base model.

    ## What it does
    Compares the base that the adapter in `lora.start_from` was trained on (`surefit.json`, or
    `base_model_name_or_path` in adapter_config.json) with `model.name_or_path`, by name.

    ## Why it is bad
    An adapter's factors are valid only with the weights that they were trained on. Training compares the files of both
    bases and stops if they differ, but only after loading the base; for an adapter that PEFT saved there is nothing to
    compare.

    ## Example
    An adapter of the first run, while `model.name_or_path` is the merged model of the first run: the adapter would be
    added twice.

    ## Fix
    Name the base that the adapter was trained on. To train on top of a finished adapter, merge it and start from the
    merged model with new factors.

    ## Evidence
    PEFT loads an adapter on any base with layers of the same shapes, without a warning.
    """
    section = config.adapter
    if section is None or section.start_from is None:
        return
    directory = Path(section.start_from).expanduser()
    base = _base_of(directory)
    if base is None or _same(base, config.model.name_or_path):
        return
    yield Finding(
        field="lora.start_from",
        message=f"{section.start_from} was trained on {base}, but model.name_or_path is {config.model.name_or_path}",
        help=f"name {base}; if the adapter is already merged, remove start_from; if both have the same files, "
        "ignore this finding",
    )


def _base_of(directory: Path) -> str | None:
    try:
        record: Any = read_json_file(directory / "surefit.json")
        return str(record["base"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        settings = adapter_config(directory)
        name = None if isinstance(settings, str) else settings.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None


def _same(first: str, second: str) -> bool:
    paths = [Path(name).expanduser() for name in (first, second)]
    return first == second or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
