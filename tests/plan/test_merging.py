"""The merge phase: one layer at a time where the files allow it, as many bytes as the real reading takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from surefit.config.schema import LoraSection, ModelSection
from surefit.facts.sharding import ShardingLayout
from surefit.merge.certify import read_logits
from surefit.model.adapter import add_adapter
from surefit.model.layerwise_forward import LayerwiseModel
from surefit.plan import merging
from surefit.plan.building import build_model, materialize_parameters
from surefit.plan.simulate import _replay_on_cpu, record_merge, record_run
from surefit.plan.step_config import StepConfig
from surefit.plan.trace import Recorder, Trace

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
LORA = StepConfig(CONFIG, "float32", LoraSection(r=4), 1, 16, cuda=False)
ROWS = [[1] * 5, [1] * 9]


def _merge_peak(trace: Trace) -> int:
    return trace.peak(dict(trace.phases)["merge"], dict(trace.phases)["end"])[0]


def test_reading_from_files_takes_what_it_takes_without_them(tmp_path: Path) -> None:
    """The same operators, hooks and lifetimes on real weights that are read from real files."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    add_adapter(model, LORA.adapter).save_pretrained(tmp_path / "adapter")
    streamed = LayerwiseModel(ModelSection(name_or_path=str(tmp_path), dtype="float32"), tmp_path, "cpu")
    adapted = streamed.with_adapter(tmp_path / "adapter")
    real = Recorder()
    with real, streamed.running(adapted), torch.no_grad():
        real.start("read")
        read_logits(adapted, ROWS, "cpu")

    def read(fake: torch.nn.Module, recorder: Recorder) -> None:
        fake.eval()
        recorder.start("read")
        with merging._WithoutFiles(fake).running(fake):
            read_logits(fake, ROWS, "cpu")

    def only_factors(fake: torch.nn.Module, recorder: Recorder) -> None:
        materialize_parameters(fake, recorder, weights=False)

    planned = record_run(build_model(LORA, "meta"), read, padded=True, cuda=False, load=only_factors)
    # Among both are the factors: in the real trace since the first product looked at them.
    assert planned.peak(dict(planned.phases)["read"])[0] == pytest.approx(real.trace.peak()[0], rel=1e-3)


def test_a_gpu_holds_one_layer_and_not_the_model() -> None:
    few = replace(LORA, cuda=True, dtype="bfloat16")
    many = few.with_layers(4)
    grown = _merge_peak(record_merge(many)) - _merge_peak(record_merge(few))
    factors = 2 * 4 * (256 * 2 * 2 + (256 + 128) * 2 + (256 + 512) * 3) * 2
    assert grown == pytest.approx(factors, rel=0.05), "of two layers more only the factors stay"


@pytest.mark.parametrize("change", [{"adapter": None}, {"quantization": "fp8"}], ids=str)
def test_what_is_not_merged_matrix_by_matrix_is_held_whole(change: dict[str, object]) -> None:
    few = replace(LORA, cuda=True, dtype="bfloat16", **change)  # type: ignore[arg-type]
    grown = _merge_peak(record_merge(few.with_layers(4))) - _merge_peak(record_merge(few))
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    bytes_each = 1 if "quantization" in change else 2
    assert grown > 2 * layer * bytes_each


def test_one_process_merges_for_all() -> None:
    alone = replace(LORA, cuda=True, dtype="bfloat16")
    assert record_merge(replace(alone, sharing=ShardingLayout("fsdp", 4, 4))).events == record_merge(alone).events


def test_on_a_cpu_a_whole_file_of_merged_weights_is_held() -> None:
    short = replace(LORA, length=1).with_layers(6)  # so that what is read is next to nothing
    weights = 4 * (2 * 4096 * 256 + 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512))
    assert weights < _merge_peak(record_merge(short)) < 1.3 * weights


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("change", [{}, {"adapter": None}], ids=str)
def test_repeating_a_reading_changes_nothing(
    layers: int, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all readings stay, and every reading needs the same memory beside them."""
    setting = replace(LORA, **change).with_layers(layers)  # type: ignore[arg-type]
    repeated = record_merge(setting)
    monkeypatch.setattr(Recorder, "repeat_keeping", lambda _, run, times: [run() for _ in range(times)])
    every = record_merge(setting)
    assert [allocation.bytes for allocation in repeated.allocations] == [each.bytes for each in every.allocations]
    merged, expected = (
        [phase for phase in _replay_on_cpu(trace) if phase.name == "merge"] for trace in (repeated, every)
    )
    assert merged == expected
