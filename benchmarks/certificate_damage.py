"""Does the certificate foresee what a damaged merge costs? Twenty of them, judged by it and by the task.

    surefit demo && python benchmarks/certificate_damage.py runs/demo [--rows 100] [--prompts 32] [--json]

Each merge of the run's adapter is damaged in its own way: another scaling, layers or modules left out or exchanged, the
weights stored in 4 or 8 bits, noise. Three verdicts are given: the certificate's checks of the weights, as `surefit
certify` makes them; its reading of the answers alone (logits, divergence, next tokens, effect kept), on `--prompts`
rows; and the task: the primary metric on `--rows` held-out rows against the sound merge, paired, with a 95 % interval.
Exits with 1 where a damaged merge passes the certificate, the sound one does not, or one that lost task score would
pass by its answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from surefit.config.schema import ModelSection
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.layouts import read_splits
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.tokenize import tokenize_prompt
from surefit.evaluate.rows import prediction_from_text
from surefit.evaluate.stats import paired_bootstrap
from surefit.generate.engine import DecodingConfig, generate
from surefit.merge import certify
from surefit.merge.merge import MergeJob, certify_merged
from surefit.model.layerwise_forward import perturb_weights
from surefit.model.load import load_model
from surefit.model.quantize import quantization_round_trip
from surefit.model.saved import load_adapted
from surefit.model.tokenizer import load_tokenizer
from surefit.stages.run_context import load_checked_run

Tensors = dict[str, torch.Tensor]
WEIGHT_CHECKS = ("weights_off_disk", "weights_off_base", "weights_not_finite", "merge_rounding")


@dataclass(frozen=True)
class Merged:
    """A sound merge as base + update, both by tensor name."""

    base: Tensors
    sound: Tensors

    def scaled(self, factor: float, keep: Callable[[str], bool] = lambda name: True) -> Tensors:
        """The update times `factor` where `keep` holds, as it is elsewhere."""
        return {
            name: (self.base[name].float() + factor * (tensor.float() - self.base[name].float())).to(tensor.dtype)
            if keep(name) else tensor
            for name, tensor in self.sound.items()
        }  # fmt: skip

    def through(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Tensors:
        """Every matrix of a layer changed."""
        return {name: change(name, tensor) if "_proj" in name else tensor for name, tensor in self.sound.items()}


def damages(merged: Merged) -> dict[str, Callable[[], Tensors]]:
    """Name → the tensors of a damaged merge."""

    def noise(share: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
        def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.clone()
            perturb_weights(moved, share, name)
            return moved

        return change

    def swapped() -> Tensors:
        other = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}
        return {
            name: next((merged.sound[name.replace(a, b)] for a, b in other.items() if a in name), tensor)
            for name, tensor in merged.sound.items()
        }

    found: dict[str, Callable[[], Tensors]] = {
        f"alpha × {factor:g}": lambda factor=factor: merged.scaled(factor)
        for factor in (0.0, 0.25, 0.5, 0.8, 0.9, 0.98, 1.02, 1.1, 1.5, 2.0, -1.0)
    }
    return found | {
        "one module left out": lambda: merged.scaled(0.0, lambda name: "layers.1.mlp.up_proj" in name),
        "one layer left out": lambda: merged.scaled(0.0, lambda name: "layers.2." in name),
        "all q, k, v left out": lambda: merged.scaled(0.0, lambda name: any(f"{x}_proj" in name for x in "qkv")),
        "stored in NF4": lambda: merged.through(lambda _, tensor: quantization_round_trip("nf4", tensor)),
        "stored in float8": lambda: merged.through(lambda _, tensor: quantization_round_trip("fp8", tensor)),
        "noise of 1 %": lambda: merged.through(noise(0.01)),
        "noise of 10 %": lambda: merged.through(noise(0.1)),
        "noise of 40 %": lambda: merged.through(noise(0.4)),
        "two layers exchanged": swapped,
    }


class Judge:
    """Both verdicts on a model's tensors."""

    def __init__(self, run: Path, rows: int, prompts: int) -> None:
        prepared = load_checked_run(run)
        self.config, self.recipe, self.hardware = prepared.resolved.config, prepared.recipe, prepared.hardware
        self.run = prepared.run
        self.tokenizer = load_tokenizer(self.config.model)
        _, held_out = read_splits(self.config.data, self.recipe, self.config.train.seed, prepared.rows, prepared.mixed)
        self.examples = [held_out.examples[i] for i in evenly_spaced_indices(len(held_out), rows)]
        dataset = build_dataset(held_out, self.tokenizer, max_length=self.config.data.max_length, too_long="drop")
        self.sequences = [dataset[i][0].tolist() for i in evenly_spaced_indices(len(dataset), prompts)]
        adapted: Any = load_adapted(self.config.model, self.run.adapter, self.hardware)
        self.tuned = certify.read_logits(adapted, self.sequences)
        with adapted.disable_adapter():
            self.base = certify.read_logits(adapted, self.sequences)
        self.dtype = getattr(torch, self.config.model.dtype)

    def open(self, tensors: Tensors) -> tuple[Any, bool]:
        """The model of these tensors, and whether the certificate's checks of the weights let it pass."""
        with tempfile.TemporaryDirectory() as folder:
            for file in self.run.merged.iterdir():
                if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                    (Path(folder) / file.name).write_bytes(file.read_bytes())
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            model = load_model(ModelSection(name_or_path=folder, dtype=self.config.model.dtype), self.hardware)
            return model, self.weights(Path(folder))

    def weights(self, folder: Path) -> bool:
        """As `surefit certify` has it, which reads few answers here: they have a verdict of their own."""
        job = MergeJob(self.config.model, self.run.adapter, folder, self.run.certificate, self.config.adapter)
        found = certify_merged(job, self.hardware, [self.sequences[0][-8:]])
        verdicts = [check["passed"] for check in found["checks"] if check["name"] in WEIGHT_CHECKS]
        return bool(verdicts) and all(verdicts)

    def certificate(self, model: Any) -> tuple[bool, float]:
        """Whether the checks of the answers pass, and the mean divergence in nats."""
        size = certify.rounding_dimensions(model)
        logits = certify.read_logits(model, self.sequences)
        kept = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            perturb_weights(parameter.data, certify.nudge(self.dtype, size), name)
        moved = certify.read_logits(model, self.sequences)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(kept[name])
        difference = certify.compare_logits(self.tuned, logits, moved, self.base)
        checks = certify.check_agreement("m", difference, self.dtype, size)
        checks.append(certify.check_effect(difference))
        divergence = next(float(check.value) for check in checks if check.name == "m_kl_mean")
        return all(check.passed for check in checks), divergence

    def task(self, model: Any) -> list[float]:
        """The primary metric of every row."""
        if not self.examples:
            return []
        prompts = [tokenize_prompt(example, self.tokenizer) for example in self.examples]
        answers = generate(model, self.tokenizer, prompts, DecodingConfig(self.config.evaluate.max_new_tokens, 25))
        return [
            self.recipe.score(example, prediction_from_text(self.recipe, answer.text, answer.truncated))[
                self.recipe.primary_metric
            ]
            for example, answer in zip(self.examples, answers, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run with merged/")
    parser.add_argument("--rows", type=int, default=100, help="held-out rows that the task is judged on; 0: it is not")
    parser.add_argument("--prompts", type=int, default=32, help="held-out rows that the certificate reads")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    judge = Judge(options.run, options.rows, options.prompts)
    base = load_model(judge.config.model, judge.hardware).state_dict()
    files = [load_file(file) for file in judge.run.merged.glob("*.safetensors")]
    sound = {name: tensor for tensors in files for name, tensor in tensors.items()}
    merged = Merged({name: base[name].to(tensor.dtype) for name, tensor in sound.items()}, sound)
    before: list[float] = []
    lines = []
    for name, make in {"none": lambda: sound, **damages(merged)}.items():
        model, weights = judge.open({key: tensor.contiguous() for key, tensor in make().items()})
        passes, divergence = judge.certificate(model)
        scores = judge.task(model)
        before = before or scores
        lines.append({"damage": name, "weights": weights, "passes": passes, "kl": divergence, **lost(before, scores)})
        if not options.json:
            print(text(lines[-1]), flush=True)
    damaged = lines[1:]
    counts = {
        "refused by the weights": sum(not line["weights"] for line in damaged),
        "refused by the answers": sum(not line["passes"] for line in damaged),
        "refused": sum(not (line["weights"] and line["passes"]) for line in damaged),
        "lost score": sum(line["lost"] for line in damaged),
        "lost score and pass by the answers": sum(line["lost"] and line["passes"] for line in damaged),
    }
    sound_passes = lines[0]["weights"] and lines[0]["passes"]
    if options.json:
        print(json.dumps({"merges": lines, "counts": counts}))
    else:
        print("sound merge:", "passes" if sound_passes else "REFUSED")
        print(f"of {len(damaged)} damaged: " + " · ".join(f"{name}: {count}" for name, count in counts.items()))
        kept = max((line["kl"] for line in damaged if not line["lost"]), default=0.0)
        least = min((line["kl"] for line in damaged if line["lost"]), default=0.0)
        if options.rows:
            print(
                f"divergence: at most {kept:.2f} nats where nothing was lost, at least {least:.2f} where something was"
            )
    wrong = counts["refused"] < len(damaged) or counts["lost score and pass by the answers"]
    sys.exit(bool(wrong) or not sound_passes)


def lost(before: list[float], scores: list[float]) -> dict[str, Any]:
    """What the task says, where it was asked."""
    if not scores:
        return {"lost": False}
    change = paired_bootstrap(before, scores)
    return {
        "score": sum(scores) / len(scores), "difference": change.difference, "ci95": [change.low, change.high],
        "lost": change.high < 0,
    }  # fmt: skip


def text(line: dict[str, Any]) -> str:
    said = ", ".join(f"{verdict} {'pass' if line[key] else 'refused'}"
                     for verdict, key in (("weights", "weights"), ("answers", "passes")))  # fmt: skip
    task = ""
    if "score" in line:
        low, high = line["ci95"]
        task = f"   {line['score']:.2f}  {line['difference']:+.2f} [{low:+.2f}, {high:+.2f}]{' LOST' * line['lost']}"
    return f"{line['damage']:22} {said:36} KL {line['kl']:9.2e}{task}"


if __name__ == "__main__":
    main()
