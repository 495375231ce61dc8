"""A merged model in fewer bits, made by the libraries that other tools read, and measured against the merged model.

These formats lose something on purpose, so the limits of certify.py, which allow for rounding only, do not apply. What
is refused is what is broken: a tensor that is not there, a logit that is no number, and a model that differs more than
its format explains. That is measured on the model itself: the merged model reads the same prompts once more with every
weight moved by twice the format's own error. Whether what is left is good enough is for the task's metric to say.
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
"""The root mean square error of normally distributed weights, as a share of theirs (measured: docs/export.md)."""
ALLOWED = 2.0
"""A conversion may differ as much as the merged model does when every weight is moved by so many of these errors."""
CONVERTER = "convert_hf_to_gguf.py"
GGUF_FILE = "model.gguf"
LLAMA_FTYPES = {"q4_k_m": 15}
"""What llama.cpp's converter does not write and its library makes of a converted file: its number of the type."""
_PACKAGES = {"nf4": ("bitsandbytes",), "int8": ("torchao",), "fp8": ("torchao",), "gguf": ("gguf",)}
_HOUR = 3600


@dataclass(frozen=True)
class Conversion:
    """What to make.

    Attributes:
        format: nf4, int8, fp8 or gguf.
        source: the merged model's directory.
        section: that model, as it is stored.
        hardware: where it is read and run; NF4, int8 and fp8 are made of the whole model in its memory.
        outtype: of a GGUF file.
        llama_cpp: a checkout of llama.cpp, for GGUF.
    """

    format: str
    source: Path
    section: ModelSection
    hardware: HardwareLike
    outtype: Outtype = "q8_0"
    llama_cpp: Path | None = None

    @property
    def share(self) -> float:
        """Of itself, by which a weight is moved to see what the format may do."""
        return ALLOWED * ERRORS[self.outtype if self.format == "gguf" else self.format]

    @property
    def how(self) -> str:
        """What made it, in words."""
        return {
            "nf4": "bitsandbytes, NF4 with double quantisation; embeddings and head as they were",
            "int8": "torchao, int8 weights with a scale per row; embeddings and head as they were",
            "fp8": "torchao, float8 (e4m3) weights with a scale per row; embeddings and head as they were",
            "gguf": f"llama.cpp's {CONVERTER}, "
            + (f"f16, and its quantiser, {self.outtype}" if self.outtype in LLAMA_FTYPES else self.outtype),
        }[self.format]


def require_convertible(conversion: Conversion) -> None:
    """Find out whether this machine can make the format, before anything is read.

    Raises:
        MachineError: what is missing, and how to get it.
    """
    missing = [name for name in _PACKAGES[conversion.format] if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{conversion.format} is made by {missing[0]}, which is not installed",
            code="E6027",
            help=f"pip install {missing[0]}",
        )
    if conversion.format == "gguf":
        find_converter(conversion.llama_cpp)
        if conversion.outtype in LLAMA_FTYPES and find_spec("llama_cpp") is None:
            raise MachineError(
                f"{conversion.outtype} is made by llama.cpp's library, which is not installed",
                code="E6028",
                help="pip install llama-cpp-python, which compiles it; or --outtype q8_0, which needs no library",
            )


def find_converter(named: Path | None) -> Path:
    """llama.cpp's converter, in the directory that is named or that LLAMA_CPP names.

    Raises:
        MachineError: no directory is named, or it is not in it.
    """
    directory = named or env.llama_cpp()
    clone = (
        "git clone https://github.com/ggml-org/llama.cpp, or `pip download --no-deps --no-binary llama-cpp-python "
        "llama-cpp-python`, which has it in vendor/llama.cpp; then --llama-cpp DIR or LLAMA_CPP=DIR"
    )
    if directory is None:
        raise MachineError(
            "GGUF is made by llama.cpp's own converter, and nothing says where it is", code="E6029", help=clone
        )
    converter = directory.expanduser() / CONVERTER
    if not converter.is_file():
        raise MachineError(f"there is no {CONVERTER} there", code="E6030", path=directory, help=clone)
    return converter


def convert_model(conversion: Conversion, directory: Path) -> None:
    """Write the weights and config of the format into a folder that has everything else already.

    Raises:
        MachineError, ModelError: the library or the converter refuses the model.
    """
    if conversion.format == "gguf":
        _convert(conversion, directory)
        return
    placed = {"": conversion.hardware.kind}
    model: Any = auto_class(AutoConfig.from_pretrained(conversion.source)).from_pretrained(
        conversion.source,
        dtype=getattr(torch, conversion.section.dtype),
        quantization_config=_config_of(conversion),
        device_map=placed,
    )
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    generation = directory / "generation_config.json"
    kept = generation.read_bytes() if generation.exists() else None
    with disk_errors(), without_deepspeed():
        model.save_pretrained(directory)
    if kept is not None:  # transformers refuses to write settings that it finds inconsistent, so they are copied
        generation.write_bytes(kept)


def _config_of(conversion: Conversion) -> Any:
    if conversion.format == "nf4":
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, conversion.section.dtype),
        )
    torchao = import_module("torchao.quantization")  # an extra
    kinds = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}
    return TorchAoConfig(kinds[conversion.format]())


def _convert(conversion: Conversion, directory: Path) -> None:
    converter = find_converter(conversion.llama_cpp)
    out, number = directory / GGUF_FILE, LLAMA_FTYPES.get(conversion.outtype)
    first, outtype = (out, conversion.outtype) if number is None else (directory / f"f16-{GGUF_FILE}", "f16")
    _run(
        CONVERTER, [str(converter), str(conversion.source), "--outfile", str(first), "--outtype", outtype], first,
        "it needs the packages of its requirements.txt, and knows not every architecture",
    )  # fmt: skip
    if number is not None:
        # In a process of its own: the library writes to stdout, and ends the process where a model is not to its taste.
        advice = "use --outtype q8_0, which the converter writes by itself"
        _run("llama.cpp's quantiser", ["-P", "-c", _QUANTISE, str(first), str(out), str(number)], out, advice)
        first.unlink()


_QUANTISE = """
import ctypes, sys
import llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype = int(sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)))
"""


def _run(name: str, arguments: Sequence[str], out: Path, advice: str) -> None:
    """A Python program of llama.cpp that writes a file.

    Raises:
        MachineError: it has not; what it said.
    """
    try:
        # Without PYTHONSAFEPATH: the converter imports what lies beside it, in the checkout that the user named.
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=6 * _HOUR,
            env=env.env_without_safepath(),
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{name} has not finished after 6 h", code="E6031", path=out) from None
    if done.returncode or not out.is_file():
        output = " ".join((done.stderr or done.stdout).split())
        lacking = re.search(r"No module named '([\w.]+)'$", output)
        if lacking:
            raise MachineError(
                f"{name} needs {lacking[1]}, which is not installed", code="E6032", help=f"pip install {lacking[1]}"
            )
        said = truncate_text(output[-400:], 400) or "nothing"
        raise MachineError(f"{name} ended with {done.returncode} and said: {said}", code="E6033", help=advice)


def measure_conversion(
    conversion: Conversion, directory: Path, sequences: Sequence[Sequence[int]]
) -> tuple[list[MergeCheck], dict[str, float]]:
    """What was made, loaded again from its files, against the merged model on the run's own prompts.

    Returns:
        The checks, and everything that was measured: logit errors, KL divergence, agreement.
    """
    model, missing = reload_converted(conversion, directory)
    checks = [MergeCheck("tensors_missing", len(missing), 0, "==", f"every tensor is in its files{': ' * bool(missing)}"
                    f"{', '.join(missing[:3])}")]  # fmt: skip
    if missing:
        return checks, {}
    other = certify.read_logits(model, sequences, conversion.hardware.kind)
    del model
    merged, moved = _merged_logits(conversion, sequences)
    found, allowed = certify.compare_logits(merged, other), certify.compare_logits(merged, moved)
    checks.append(MergeCheck("logits_not_finite", found.infinite, 0, "==", "a logit that is no number is no answer"))
    if found.infinite:
        return checks, {}
    measured = {
        "positions": found.positions,
        "logit_deviation": found.deviation,
        "logit_error_mean": found.absolute / found.entries,
        "logit_error_max": found.largest,
        "kl_mean": found.divergence / found.positions,
        "top1_agreement": found.agreeing / found.positions,
    }
    why = f"what moving every weight of the merged model by {conversion.share:.2g} of itself does to it"
    share = allowed.agreeing / allowed.positions
    slack = 3 * math.sqrt(share * (1 - share) / allowed.positions)
    return [
        *checks,
        MergeCheck("logit_error_mean", measured["logit_error_mean"], allowed.absolute / allowed.entries, "<=", why),
        MergeCheck(
            "top1_agreement",
            measured["top1_agreement"],
            max(0.0, share - slack),
            ">=",
            f"{why}, three standard errors less",
        ),
    ], measured


def reload_converted(conversion: Conversion, directory: Path) -> tuple[Any, list[str]]:
    """The model as others will load it, and the tensors that transformers did not find in its files.

    Raises:
        ModelError: transformers cannot read it at all.
    """
    options: dict[str, Any] = {"gguf_file": GGUF_FILE} if conversion.format == "gguf" else {}
    if conversion.hardware.kind == "cuda":
        start_cuda()
    try:
        config: Any = AutoConfig.from_pretrained(directory, **options)
        loaded: Any = auto_class(config).from_pretrained(
            directory,
            dtype=getattr(torch, conversion.section.dtype),
            device_map={"": conversion.hardware.kind},
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # each library has errors of its own
        raise ModelError(
            f"the {conversion.format} files cannot be loaded again: {env.first_line(error)}",
            code="E6034",
            path=directory,
            help="without loading them nobody knows what they are: use another format, or another transformers",
        ) from error
    model, report = loaded
    finish_loading(model, conversion.format if conversion.format == "nf4" else "none")
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return model.eval(), sorted(missing)


def _merged_logits(conversion: Conversion, sequences: Sequence[Sequence[int]]) -> tuple[certify.Logits, certify.Logits]:
    """What the merged model answers as it is, and with every weight moved; from its files where it can be."""
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
