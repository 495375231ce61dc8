"""Pairs packed as two documents and with their prompt once, on the same model: seconds, memory and differences.

python benchmarks/shared_prompts.py [--model surefit/nano] [--prompts 64,256,1000] [--answers 50,200] [--pairs 1]
                                    [--device cpu] [--dtype float32] [--repeat 1] [--json FILE]

Forward and backward of dpo with LoRA (rank 8 on all linear layers, random factors) on a micro batch of random tokens.
On a CPU the seconds are of the processor, on one thread; each measurement has a process of its own, so that its peak
memory is its own. "off by" are the largest differences of the answers' log-probabilities, in nats, and of the
gradient, as a share of its largest number.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from surefit.config.schema import ModelSection, ObjectiveSection
from surefit.data.tokens import prompt_share
from surefit.data.tokens.collate import Item, collate_packed, describe_pairs
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.model.attention import use_varlen
from surefit.model.load import load_model
from surefit.train.objectives.pairs import PairObjective

LAYOUTS = ("two documents", "shared prompt")


def random_pairs(pairs: int, prompt: int, answer: int, vocabulary: int) -> list[Item]:
    """Return pairs of random tokens, all with these lengths."""
    rng = np.random.default_rng(0)
    items = []
    for _ in range(pairs):
        start = rng.integers(3, vocabulary, prompt)
        for _ in range(2):
            ids = np.concatenate([start, rng.integers(3, vocabulary, answer)])
            items.append((ids, np.where(np.arange(len(ids)) < prompt, -100, ids)))
    return items


def measure_layout(args: argparse.Namespace) -> dict[str, Any]:
    """Run one layout in this process; its log-probabilities and gradients go to `args.tensors`."""
    torch.set_num_threads(1)
    prompt_share.LEAST_SHARE = 0.0  # every prompt is shared, however short: the rule comes from these numbers
    cuda = args.device == "cuda"
    base = load_base(args)
    torch.manual_seed(0)
    model: Any = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    model.to(args.device, getattr(torch, args.dtype)).train()
    use_varlen(model)
    items = random_pairs(args.pairs, args.prompt, args.answer, base.config.get_text_config().vocab_size)
    batch = collate_shared(items) if args.layout == LAYOUTS[1] else collate_packed(items)
    batch |= describe_pairs(items, np.full((args.pairs, 2), -10.0 * args.answer, np.float32))
    objective = PairObjective(ObjectiveSection(name="dpo", beta=0.1))
    start_bytes = peak_bytes(cuda)
    seconds = []
    for _ in range(args.repeat + 2 * cuda):  # a GPU's first times choose kernels
        model.zero_grad()
        sums: list[torch.Tensor] = []
        begin = clock(cuda)
        loss = objective.loss_of(objective.totals([batch]), True, [], sums)(model, batch)
        loss.backward()
        seconds.append(clock(cuda) - begin)
    used = peak_bytes(cuda) - (0 if cuda else start_bytes)
    tensors = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    torch.save(tensors | {"log_probs": sums[-1][4:6].cpu() / args.pairs}, args.tensors)
    tokens = batch["input_ids"].numel() / args.pairs
    return {"tokens": tokens, "seconds per pair": min(seconds) / args.pairs, "peak bytes": used}


def load_base(args: argparse.Namespace) -> Any:
    """Return the model; `random-1b` has Llama 3.2 1B's shape, and is drawn on the device."""
    if args.model != "random-1b":
        return load_model(ModelSection(name_or_path=args.model, dtype=args.dtype), SimpleNamespace(kind=args.device))
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2_048, intermediate_size=8_192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))


def clock(cuda: bool) -> float:
    """Return seconds: of the processor, or of the wall once the GPU is done."""
    if not cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(cuda: bool) -> int:
    return torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_layout(args: argparse.Namespace, layout: str, prompt: int, answer: int, tensors: Path) -> dict[str, Any]:
    """Measure one layout; on a CPU in a process of its own, because its peak memory is the process's."""
    own = argparse.Namespace(**vars(args) | {"layout": layout, "prompt": prompt, "answer": answer, "tensors": tensors})
    if args.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return measure_layout(own)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure_layout, (own,))


def differences(one: Path, other: Path) -> tuple[float, float]:
    """Return the largest difference of log-probabilities, and of gradients as a share of the largest number."""
    first, second = torch.load(one), torch.load(other)
    log_probs = float((first.pop("log_probs") - second.pop("log_probs")).abs().max())
    largest = max(float(tensor.abs().max()) for tensor in first.values())
    return log_probs, max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def compare(args: argparse.Namespace, prompt: int, answer: int) -> dict[str, Any]:
    """Measure both layouts for a prompt and answers of these lengths."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / f"{number}.pt" for number in range(2)]
        two, once = (
            run_layout(args, layout, prompt, answer, place) for layout, place in zip(LAYOUTS, places, strict=True)
        )
        log_probs, gradient = differences(*places)
    return {
        "prompt": prompt, "answer": answer, "saved": 1 - once["tokens"] / two["tokens"],
        "two documents": two, "shared prompt": once, "faster": two["seconds per pair"] / once["seconds per pair"],
        "log-probabilities off by": log_probs, "gradient off by": gradient,
    }  # fmt: skip


def line_of(found: dict[str, Any]) -> str:
    """Return a measurement as a row of the table."""
    sides = [
        f"{side['seconds per pair']:.3f} | {side['tokens'] / side['seconds per pair']:,.0f} | "
        f"{side['peak bytes'] / 2**20:,.0f}"
        for side in (found[layout] for layout in LAYOUTS)
    ]
    return (
        f"{found['prompt']} | {found['answer']} | {found['saved']:.1%} | {sides[0]} | {sides[1]} | "
        f"{found['faster']:.2f} | {found['log-probabilities off by']:.1e} | {found['gradient off by']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="surefit/nano")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256, 1000])
    parser.add_argument("--answers", type=lambda text: [int(n) for n in text.split(",")], default=[50, 200])
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sides = " | ".join(f"{layout}: s per pair | tokens/s | MiB" for layout in LAYOUTS)
    print(f"prompt | answer | saved | {sides} | times faster | log-probabilities off by | gradient off by", flush=True)
    found = []
    for prompt in args.prompts:
        for answer in args.answers:
            found.append(compare(args, prompt, answer))
            print(line_of(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
