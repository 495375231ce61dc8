"""What a merge takes: memory and time of `surefit merge` and of PEFT's merge_and_unload, on the same random model.

    python benchmarks/merge_memory.py                        8B-shaped, 32 layers: 16 GB of disk, twice
    python benchmarks/merge_memory.py --layers 8 --peft      with the peer, which needs the whole model in memory

The model has Llama-3.1-8B's shapes, bfloat16, in shards of `--shard-gb`, with random weights, and a random LoRA adapter
(r 16, all linear layers). Each tool runs in a process of its own; its peak is the kernel's VmHWM, in which pages of
mapped files count too. SureFit's figure includes the certificate (four readings of `--rows` × `--row-tokens` tokens);
PEFT's is load, merge, save, and proves nothing.
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


def surefit(folder: Path, rows: int, row_tokens: int) -> None:
    """The merge with its certificate."""
    import torch

    from surefit.config.schema import ModelSection
    from surefit.merge.merge import Job, merge_adapter

    class Cpu:
        kind = "cpu"

    ids = torch.randint(5, 1500, (rows, row_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    base = ModelSection(name_or_path=str(folder / "base"), dtype="bfloat16")
    job = Job(base, folder / "adapter", folder / "merged", folder / "certificate.json")
    merge_adapter(job, Cpu(), ids)  # type: ignore[arg-type]


def peft(folder: Path) -> None:
    """What PEFT's documentation shows."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().save_pretrained(folder / "peft")


def measured(*arguments: str) -> dict[str, float]:
    """Wall seconds, processor seconds and peak gigabytes of this script with other arguments."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return {"seconds": time.monotonic() - started, **json.loads(done.stdout.splitlines()[-1])}


def say_own_peak() -> None:
    """What the kernel knows about this process."""
    import resource

    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak_gb": int(peak.split()[1]) * 1024 / 1e9, "cpu_seconds": usage.ru_utime + usage.ru_stime}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shard-gb", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=16)
    parser.add_argument("--peft", action="store_true", help="also the peer")
    parser.add_argument("--folder", type=Path, help="where the models are written; a temporary folder by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["make", "surefit", "peft"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        {
            "make": lambda: make(options.folder, options.layers, options.shard_gb),
            "surefit": lambda: surefit(options.folder, options.rows, options.row_tokens),
            "peft": lambda: peft(options.folder),
        }[options.only]()
        say_own_peak()
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    given = ["--folder", str(folder), "--layers", str(options.layers), "--shard-gb", str(options.shard_gb),
             "--rows", str(options.rows), "--row-tokens", str(options.row_tokens)]  # fmt: skip
    try:
        measured("--only", "make", *given)
        shard = max(file.stat().st_size for file in (folder / "base").glob("*.safetensors")) / 1e9
        found = {"surefit": measured("--only", "surefit", *given)}
        shutil.rmtree(folder / "merged")
        if options.peft:
            found["peft"] = measured("--only", "peft", *given)
    finally:
        shutil.rmtree(folder)
    ok = found["surefit"]["peak_gb"] <= LIMIT_GB + shard
    if options.json:
        print(json.dumps({"shard_gb": shard, "limit_gb": LIMIT_GB + shard, "within": ok, **found}))
    else:
        print(f"{options.layers} layers of Llama-3.1-8B's shape, largest shard {shard:.2f} GB")
        for name, values in found.items():
            print(f"{name:8} peak {values['peak_gb']:6.2f} GB   {values['seconds']:7.1f} s   "
                  f"{values['cpu_seconds']:7.1f} s of processor")  # fmt: skip
        print(f"{'within' if ok else 'OVER'} the limit of {LIMIT_GB + shard:.2f} GB (3 GB and a shard)")
        if options.peft:
            ratio = found["surefit"]["cpu_seconds"] / found["peft"]["cpu_seconds"]
            print(f"processor time, SureFit with its certificate over PEFT without one: {ratio:.2f}")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
