"""Converts a merged model to fewer bits with the libraries that other tools read, and compares it with the merged
model.

These formats are lossy, so the limits of certify.py, which allow for rounding only, do not apply. A conversion fails if
a tensor is missing, a logit is not finite, or the model differs more than its format explains. That limit is measured
on the model itself: the merged model reads the same prompts again with every weight moved by twice the format's own
error. Whether the quality is sufficient is for the task's metric to decide.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, TorchAoConfig

from surefit.config.resolve import HardwareLike
from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.core.errors import MachineError, ModelError
from surefit.core.rundir import disk_errors
from surefit.core.units import truncate_text
from surefit.merge import certify
from surefit.merge.certify import MergeCheck
from surefit.model.classes import auto_class
from surefit.model.compat import without_deepspeed
from surefit.model.layerwise_forward import LayerwiseModel, perturb_weights
from surefit.model.load import load_model
from surefit.model.quantize import finish_loading
from surefit.model.sdpa import start_cuda

Outtype = Literal["f16", "bf16", "q8_0", "q4_k_m"]
ERRORS = {"nf4": 0.092, "int8": 0.0079, "fp8": 0.0264, "q4_k_m": 0.0713, "q8_0": 0.0053, "bf16": 0.0017, "f16": 0.0002}
"""Root mean square error of normally distributed weights, relative to their root mean square (measured:
docs/export.md)."""
ALLOWED = 2.0
"""A conversion may differ as much as the merged model does when every weight is moved by this multiple of the error."""
CONVERTER = "convert_hf_to_gguf.py"
GGUF_FILE = "model.gguf"
LLAMA_FTYPES = {"q4_k_m": 15}
"""Types that llama.cpp's converter does not write and its library quantizes from a converted file: name → llama.cpp's
number of the type."""
_PACKAGES = {"nf4": ("bitsandbytes",), "int8": ("torchao",), "fp8": ("torchao",), "gguf": ("gguf",)}
_HOUR = 3600


@dataclass(frozen=True)
class Conversion:
    """A conversion to make.

    Attributes:
        format: nf4, int8, fp8 or gguf.
        source: the merged model's directory.
        section: `model` section for the merged model, as it is stored.
        hardware: loads and runs the model; NF4, int8 and fp8 need the whole model in its memory.
        outtype: type of a GGUF file.
        llama_cpp: directory of a llama.cpp checkout, for GGUF.
    """

    format: str
    source: Path
    section: ModelSection
    hardware: HardwareLike
    outtype: Outtype = "q8_0"
    llama_cpp: Path | None = None

    @property
    def share(self) -> float:
        """Relative change of a weight that bounds the effect of the format."""
        return ALLOWED * ERRORS[self.outtype if self.format == "gguf" else self.format]

    @property
    def how(self) -> str:
        """Description of the tool and settings of the conversion."""
        return {
            "nf4": "bitsandbytes, NF4 with double quantization; embeddings and head unchanged",
            "int8": "torchao, int8 weights with a scale per row; embeddings and head unchanged",
            "fp8": "torchao, float8 (e4m3) weights with a scale per row; embeddings and head unchanged",
            "gguf": f"llama.cpp's {CONVERTER}, "
            + (f"f16, and its quantizer, {self.outtype}" if self.outtype in LLAMA_FTYPES else self.outtype),
        }[self.format]


def require_convertible(conversion: Conversion) -> None:
    """Raise if this machine cannot make the format, before anything is read.

    Raises:
        MachineError: names the missing package or file, and how to get it.
    """
    missing = [name for name in _PACKAGES[conversion.format] if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{conversion.format} needs {missing[0]}, which is not installed",
            code="E6027",
            help=f"pip install {missing[0]}",
        )
    if conversion.format == "gguf":
        find_converter(conversion.llama_cpp)
        if conversion.outtype in LLAMA_FTYPES and find_spec("llama_cpp") is None:
            raise MachineError(
                f"{conversion.outtype} needs llama.cpp's library, which is not installed",
                code="E6028",
                help="pip install llama-cpp-python, which compiles it; or --outtype q8_0, which needs no library",
            )


def find_converter(named: Path | None) -> Path:
    """Return llama.cpp's converter, in the directory `named` or in the one of LLAMA_CPP.

    Raises:
        MachineError: no directory is given, or the converter is not in it.
    """
    directory = named or env.llama_cpp()
    clone = (
        "git clone https://github.com/ggml-org/llama.cpp, or `pip download --no-deps --no-binary llama-cpp-python "
        "llama-cpp-python`, which has it in vendor/llama.cpp; then --llama-cpp DIR or LLAMA_CPP=DIR"
    )
    if directory is None:
        raise MachineError("GGUF needs llama.cpp's converter, which was not found", code="E6029", help=clone)
    converter = directory.expanduser() / CONVERTER
    if not converter.is_file():
        raise MachineError(f"there is no {CONVERTER} there", code="E6030", path=directory, help=clone)
    return converter


def convert_model(conversion: Conversion, directory: Path) -> None:
    """Write the weights and config of the format into a directory with all the other files.

    Raises:
        MachineError, ModelError: the library or the converter does not support the model.
    """
    if conversion.format == "gguf":
        _convert(conversion, directory)
        return
    device_map = {"": conversion.hardware.kind}
    model: Any = auto_class(AutoConfig.from_pretrained(conversion.source)).from_pretrained(
        conversion.source,
        dtype=getattr(torch, conversion.section.dtype),
        quantization_config=_config_of(conversion),
        device_map=device_map,
    )
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    generation = directory / "generation_config.json"
    generation_bytes = generation.read_bytes() if generation.exists() else None
    with disk_errors(), without_deepspeed():
        model.save_pretrained(directory)
    if (
        generation_bytes is not None
    ):  # transformers does not write settings that it finds inconsistent, so the file is copied
        generation.write_bytes(generation_bytes)


def _config_of(conversion: Conversion) -> Any:
    if conversion.format == "nf4":
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, conversion.section.dtype),
        )
    torchao = import_module("torchao.quantization")  # an optional dependency
    kinds = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}
    return TorchAoConfig(kinds[conversion.format]())


def _convert(conversion: Conversion, directory: Path) -> None:
    converter = find_converter(conversion.llama_cpp)
    out, ftype = directory / GGUF_FILE, LLAMA_FTYPES.get(conversion.outtype)
    output, outtype = (out, conversion.outtype) if ftype is None else (directory / f"f16-{GGUF_FILE}", "f16")
    _run(
        CONVERTER, [str(converter), str(conversion.source), "--outfile", str(output), "--outtype", outtype], output,
        "it needs the packages of its requirements.txt, and does not support every architecture",
    )  # fmt: skip
    if ftype is not None:
        # In a separate process: the library writes to stdout, and exits the process if it does not support a model.
        advice = "use --outtype q8_0, which the converter writes by itself"
        _run("llama.cpp's quantizer", ["-P", "-c", _QUANTISE, str(output), str(out), str(ftype)], out, advice)
        output.unlink()


_QUANTISE = """
import ctypes, sys
import llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype = int(sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)))
"""


_UNKNOWN_TOKENIZER = "BPE pre-tokenizer was not recognized"
"""In the converter's message: it knows byte-level tokenizers by a hash of what they make of a text."""


def _run(name: str, arguments: Sequence[str], out: Path, advice: str) -> None:
    """Run a Python program of llama.cpp that writes a file.

    Raises:
        MachineError: the file was not written; with the program's output.
    """
    try:
        # Without PYTHONSAFEPATH: the converter imports modules from its directory, the checkout that the user named.
        process = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=6 * _HOUR,
            env=env.env_without_safepath(),
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{name} has not finished after 6 h", code="E6031", path=out) from None
    if process.returncode or not out.is_file():
        output = " ".join((process.stderr or process.stdout).split())
        missing_module = re.search(r"No module named '([\w.]+)'$", output)
        if missing_module:
            raise MachineError(
                f"{name} needs {missing_module[1]}, which is not installed",
                code="E6032",
                help=f"pip install {missing_module[1]}",
            )
        if _UNKNOWN_TOKENIZER in output:
            raise MachineError(
                f"{name} does not know this model's tokenizer ({_UNKNOWN_TOKENIZER})",
                code="E6985",
                help="it does not know surefit/nano's: train another base model for GGUF and Ollama. A newer checkout "
                "of llama.cpp may know others. `--format hub` writes the model for vLLM, SGLang and transformers",
            )
        message = truncate_text(output[-400:], 400) or "nothing"
        raise MachineError(f"{name} exited with status {process.returncode}: {message}", code="E6033", help=advice)


def measure_conversion(
    conversion: Conversion, directory: Path, sequences: Sequence[Sequence[int]]
) -> tuple[list[MergeCheck], dict[str, float]]:
    """Load the converted model from its files, and compare it with the merged model on the run's own prompts.

    Returns:
        The checks, and all measurements: logit errors, KL divergence, agreement.
    """
    model, missing = reload_converted(conversion, directory)
    checks = [MergeCheck("tensors_missing", len(missing), 0, "==", f"every tensor is in its files{': ' * bool(missing)}"
                    f"{', '.join(missing[:3])}")]  # fmt: skip
    if missing:
        return checks, {}
    converted = certify.read_logits(model, sequences, conversion.hardware.kind)
    del model
    merged, nudged = _merged_logits(conversion, sequences)
    errors, allowed = certify.compare_logits(merged, converted), certify.compare_logits(merged, nudged)
    checks.append(MergeCheck("logits_not_finite", errors.infinite, 0, "==", "every logit must be a finite number"))
    if errors.infinite:
        return checks, {}
    measurements = {
        "positions": errors.positions,
        "logit_deviation": errors.deviation,
        "logit_error_mean": errors.absolute / errors.entries,
        "logit_error_max": errors.largest,
        "kl_mean": errors.divergence / errors.positions,
        "top1_agreement": errors.agreeing / errors.positions,
    }
    why = f"the effect of moving every weight of the merged model by {conversion.share:.2g} of itself"
    share = allowed.agreeing / allowed.positions
    slack = 3 * math.sqrt(share * (1 - share) / allowed.positions)
    return [
        *checks,
        MergeCheck("logit_error_mean", measurements["logit_error_mean"], allowed.absolute / allowed.entries, "<=", why),
        MergeCheck(
            "top1_agreement",
            measurements["top1_agreement"],
            max(0.0, share - slack),
            ">=",
            f"{why}, three standard errors less",
        ),
    ], measurements


def reload_converted(conversion: Conversion, directory: Path) -> tuple[Any, list[str]]:
    """Load the model as others will load it; return it with the tensors that transformers did not find in its files.

    Raises:
        ModelError: transformers cannot read it at all.
    """
    options: dict[str, Any] = {"gguf_file": GGUF_FILE} if conversion.format == "gguf" else {}
    if conversion.hardware.kind == "cuda":
        start_cuda()
    try:
        config: Any = AutoConfig.from_pretrained(directory, **options)
        model_and_report: Any = auto_class(config).from_pretrained(
            directory,
            dtype=getattr(torch, conversion.section.dtype),
            device_map={"": conversion.hardware.kind},
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # each library has its own exceptions
        raise ModelError(
            f"the {conversion.format} files cannot be loaded again: {env.first_line(error)}",
            code="E6034",
            path=directory,
            help="files that cannot be loaded cannot be certified: use another format, or another transformers",
        ) from error
    model, report = model_and_report
    finish_loading(model, conversion.format if conversion.format == "nf4" else "none")
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return model.eval(), sorted(missing)


def _merged_logits(conversion: Conversion, sequences: Sequence[Sequence[int]]) -> tuple[certify.Logits, certify.Logits]:
    """Return the logits of the merged model, and its logits with every weight moved; run from its files if possible."""
    kind, share = conversion.hardware.kind, conversion.share
    streamed = LayerwiseModel(conversion.section, conversion.source, kind)
    if streamed.why_not():
        model = load_model(conversion.section, conversion.hardware)
        logits = certify.read_logits(model, sequences)
        for name, parameter in model.named_parameters():
            perturb_weights(parameter.data, share, name)
        return logits, certify.read_logits(model, sequences)
    with streamed.running(streamed.model):
        logits = certify.read_logits(streamed.model, sequences, kind)
    with streamed.running(streamed.model, share):
        return logits, certify.read_logits(streamed.model, sequences, kind)
