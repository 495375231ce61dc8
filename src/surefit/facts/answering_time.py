"""Seconds that generating answers costs beside training, from a GPU's data sheet: a lower bound without launches.

A batch of b prompts of p tokens is read in 2 × N × b × p operations, N the model's parameters. Each of the a answer
tokens is written in a pass that reads all weights, and the KV cache three times (`plan/scoring_time.py` says why), when
half of an answer is written on average:

    seconds = 2 N b p / FLOP/s + a × (weights + 3 × b × (p + a / 2) × cache per token) / bandwidth

Worked example, Llama-3.1-8B in bfloat16 on an H100 (989 TFLOP/s, 3.35 TB/s), b 16, p 2,048, a 256: 2 × 8.03e9 × 16 ×
2,048 / 989e12 = 0.53 s, and 256 × (14.96 + 3 × 16 × 2,176 / 8,192) GiB / 3.35 TB/s = 2.27 s. With the same rates a
step of LoRA on 64 rows of 2,048 tokens takes about 4 N × 64 × 2,048 / 989e12 = 4.3 s: 25 such batches, 400 prompts,
are 16 steps.
"""

from __future__ import annotations

import math

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig, decided
from surefit.config.world import count_processes
from surefit.facts.eval_prompts import EvalPromptSet
from surefit.facts.flops import FORWARD, TRAINED, training_flops
from surefit.facts.gpus import GpuSpec
from surefit.facts.model import DTYPE_BYTES, ModelFacts


def answering_seconds(
    config: SureFitConfig, model: ModelFacts, gpu: GpuSpec, prompts: int, prompt: float, answer: int
) -> float:
    """Return the seconds to answer this many prompts of `prompt` tokens with `answer` tokens each. Nothing in the
    config is "auto", and the model's size, the GPU's FLOP/s and its bandwidth are known."""
    section, number, flops = config.evaluate, DTYPE_BYTES[config.model.dtype], gpu.flops(config.model.dtype)
    assert isinstance(section.batch_size, int)
    assert model.parameters
    assert flops
    assert gpu.bandwidth
    sequences = prompts * section.samples * section.num_beams
    rows = min(sequences, section.batch_size * section.num_beams)
    cache_per_token = 2 * model.num_layers * model.num_key_value_heads * model.head_dim * number
    reading = 2 * model.parameters * rows * prompt / flops
    bytes_per_token = number * model.parameters + 3 * rows * (prompt + answer / 2) * cache_per_token
    return math.ceil(sequences / rows) * (reading + answer * bytes_per_token / gpu.bandwidth)


def checkpoints_against_training(
    resolved: ResolvedConfig, model: ModelFacts, gpu: GpuSpec, held_out: EvalPromptSet
) -> tuple[int, float] | None:
    """Return (checkpoints, upper bound of the time that answering the held-out prompts at all of them costs, as a
    multiple of the training time); None where a quantity that this needs is not known."""
    config, steps = resolved.config, resolved.total_steps
    interval, flops = config.checkpoint.save_steps, gpu.flops(config.model.dtype)
    work = training_flops(model, config)
    is_known = model.parameters and flops and gpu.bandwidth and held_out.prompts and held_out.mean
    if not is_known or work is None or not steps or not isinstance(interval, int):
        return None
    assert flops
    assert held_out.prompts
    assert held_out.mean
    length = min(config.data.max_length, math.ceil(held_out.mean + (held_out.answer or config.evaluate.max_new_tokens)))
    rows = decided(config.train.global_batch_size)
    step_flops = work.of([length] * rows, length * rows)
    if config.train.gradient_checkpointing is not False:
        full_training = config.model_copy(update={"train": config.train.model_copy(update={"method": "full"})})
        full_flops = training_flops(model, full_training)
        step_flops += round(FORWARD / TRAINED * full_flops.of([length] * rows, 0)) if full_flops else 0
    training = steps * step_flops / flops / count_processes(config)
    checkpoints = math.ceil(steps / interval)
    seconds = answering_seconds(config, model, gpu, held_out.prompts, held_out.mean, config.evaluate.max_new_tokens)
    return checkpoints, checkpoints * seconds / training
