"""What a merge takes: memory and time of `surefit merge` and of PEFT's merge_and_unload, on the same random model.

    python benchmarks/merge_memory.py                        8B-shaped, 32 layers: 16 GB of disk, twice
    python benchmarks/merge_memory.py --layers 8 --peft      with the peer, which needs the whole model in memory
    python benchmarks/merge_memory.py --model DIR --adapter DIR --peft      a model and an adapter that are there

By default the model has Llama-3.1-8B's shapes, bfloat16, in shards of `--shard-gb`, with random weights, and a random
LoRA adapter (r 16, all linear layers). Each tool runs in a process of its own; its peak is the kernel's VmHWM, in which
pages of mapped files count too. SureFit's figure includes the certificate (four readings of `--rows` × `--row-tokens`
tokens); PEFT's is load, merge, save, and proves nothing: beside it stands the time until SureFit's weights are written.
With a model that is there, and the peer, the logits of both merges are compared with the adapter's beside its base.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LIMIT_GB = 3.0
"""Beside one shard, what a merge may take."""


def make(folder: Path, layers: int, shard_gb: float) -> None:
    """Write base/ and adapter/, a tensor at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from surefit import nano

    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    config.save_pretrained(base)
    AutoTokenizer.from_pretrained(nano.PATH).save_pretrained(base)
    places: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    size, number = 0, 0

    def flush() -> None:
        nonlocal held, size, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(held, base / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, file))
        held, size = {}, 0

    factors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0, 0.02)
        if "_proj" in name:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{prefix}.lora_A.weight"] = torch.randn(16, shape[1]).mul_(0.01).bfloat16()
            factors[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], 16).mul_(0.01).bfloat16()
        held[name] = tensor
        size += tensor.nbytes
        if size > shard_gb * 1e9:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": places}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(settings))


def dtype_of(folder: Path) -> str:
    """In which the base is stored, and merged here."""
    config = json.loads((folder / "base/config.json").read_text())
    return str(config.get("dtype") or config["torch_dtype"])


def sequences(folder: Path, rows: int, row_tokens: int) -> list[list[int]]:
    """What the models are given to read: sequences.json, or random tokens."""
    import torch

    written = folder / "sequences.json"
    if written.is_file():
        return json.loads(written.read_text())
    return torch.randint(5, 1500, (rows, row_tokens), generator=torch.Generator().manual_seed(0)).tolist()


def surefit(folder: Path, ids: list[list[int]]) -> dict[str, float]:
    """The merge with its certificate; the seconds from its start until the weights are written."""
    from surefit.config.schema import ModelSection
    from surefit.merge.merge import MergeJob, merge_adapter_job

    class Cpu:
        kind = "cpu"

    began, reached = time.monotonic(), dict[int, float]()
    base = ModelSection(name_or_path=str(folder / "base"), dtype=dtype_of(folder))
    job = MergeJob(base, folder / "adapter", folder / "merged", folder / "certificate.json")
    merge_adapter_job(job, Cpu(), ids, lambda step, *_: reached.setdefault(step, time.monotonic() - began))  # type: ignore[arg-type]
    return {"written_seconds": reached[2], "merge_seconds": reached[4]}


def peft(folder: Path) -> dict[str, float]:
    """What PEFT's documentation shows."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, dtype_of(folder)))
    PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().save_pretrained(folder / "peft")
    return {"merge_seconds": time.monotonic() - began}


def logits(folder: Path, ids: list[list[int]]) -> dict[str, Any]:
    """How far each merge's logits are from those of the adapter beside its base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from surefit.merge import certify

    def opened(place: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype_of(folder))).eval()

    tuned = certify.read_logits(PeftModel.from_pretrained(opened(folder / "base"), folder / "adapter").eval(), ids)
    found = {}
    for name in ("merged", "peft"):
        off = certify.compare_logits(tuned, certify.read_logits(opened(folder / name), ids))
        found[name] = {
            "positions": off.positions, "deviation": off.deviation, "mean": off.absolute / off.entries,
            "largest": off.largest, "top1_agreement": off.agreeing / off.positions,
        }  # fmt: skip
    return {"off": found}


def measured(*arguments: str) -> dict[str, Any]:
    """Wall seconds, processor seconds and peak gigabytes of this script with other arguments."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return {"seconds": time.monotonic() - started, **json.loads(done.stdout.splitlines()[-1])}


def say_own_peak(found: dict[str, Any] | None) -> None:
    """What was found, and what the kernel knows about this process."""
    import resource

    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = {"peak_gb": int(peak.split()[1]) * 1024 / 1e9, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    print(json.dumps(own | (found or {})))


def compared(folder: Path, *given: str) -> dict[str, Any]:
    """Both tools on base/ and adapter/ of a folder, each in a process of its own, and what their models answer."""
    place = ("--folder", str(folder), *given)
    found = {name: measured("--only", name, *place) for name in ("surefit", "peft")}
    return found | {"logits": measured("--only", "logits", *place)["off"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shard-gb", type=float, default=2.0)
    parser.add_argument("--model", type=Path, help="a model's directory instead of random weights")
    parser.add_argument("--adapter", type=Path, help="its adapter")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=16)
    parser.add_argument("--peft", action="store_true", help="also the peer")
    parser.add_argument("--folder", type=Path, help="where the models are written; a temporary folder by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["make", "surefit", "peft", "logits"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.model is None) != (options.adapter is None):
        parser.error("--model and --adapter need each other")
    if options.only:
        child(options)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    given = ["--layers", str(options.layers), "--shard-gb", str(options.shard_gb),
             "--rows", str(options.rows), "--row-tokens", str(options.row_tokens)]  # fmt: skip
    try:
        if options.model:
            (folder / "base").symlink_to(options.model.absolute())
            (folder / "adapter").symlink_to(options.adapter.absolute())
        else:
            measured("--only", "make", "--folder", str(folder), *given)
        shard = max(file.stat().st_size for file in (folder / "base").glob("*.safetensors")) / 1e9
        if options.peft and options.model:
            found = compared(folder, *given)
        else:
            found = {"surefit": measured("--only", "surefit", "--folder", str(folder), *given)}
            shutil.rmtree(folder / "merged")
            if options.peft:
                found["peft"] = measured("--only", "peft", "--folder", str(folder), *given)
    finally:
        shutil.rmtree(folder)
    ok = found["surefit"]["peak_gb"] <= LIMIT_GB + shard
    if options.json:
        print(json.dumps({"shard_gb": shard, "limit_gb": LIMIT_GB + shard, "within": ok, **found}))
    else:
        what = f"{options.layers} layers of Llama-3.1-8B's shape" if options.model is None else options.model.name
        print(f"{what}, largest shard {shard:.2f} GB\n{text(found)}")
        print(f"{'within' if ok else 'OVER'} the limit of {LIMIT_GB + shard:.2f} GB (3 GB and a shard)")
    sys.exit(not ok)


def child(options: argparse.Namespace) -> None:
    ids = [] if options.only == "make" else sequences(options.folder, options.rows, options.row_tokens)
    found = {
        "make": lambda: make(options.folder, options.layers, options.shard_gb),
        "surefit": lambda: surefit(options.folder, ids),
        "peft": lambda: peft(options.folder),
        "logits": lambda: logits(options.folder, ids),
    }[options.only]()
    say_own_peak(found)


def text(found: dict[str, Any]) -> str:
    """A line per tool, the ratio of the processor times, a line per merge."""
    tools = {name: values for name, values in found.items() if name != "logits"}
    lines = [
        f"{name:8} peak {values['peak_gb']:6.2f} GB   {values['seconds']:7.1f} s   {values['cpu_seconds']:7.1f} s of "
        f"processor   merge {values['merge_seconds']:.1f} s"
        + (f", written after {values['written_seconds']:.1f} s" if "written_seconds" in values else "")
        for name, values in tools.items()
    ]
    if "peft" in tools:
        ratio = tools["surefit"]["cpu_seconds"] / tools["peft"]["cpu_seconds"]
        lines.append(f"processor time, SureFit with its certificate over PEFT without one: {ratio:.2f}")
    for name, off in found.get("logits", {}).items():
        lines.append(
            f"{'surefit' if name == 'merged' else name:8} logits off the adapter's by {off['mean']:.2e} on average, "
            f"{off['largest']:.2e} at most, of a deviation of {off['deviation']:.2f}; next tokens equal in "
            f"{off['top1_agreement']:.2%} of {off['positions']:,}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
