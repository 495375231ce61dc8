"""The switches that save memory change nothing that is learnt, alone or together, and each really saves some."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import families
import numpy as np
import pytest
import torch

from surefit.config.schema import LoraSection
from surefit.data.tokens.collate import collate, collate_packed
from surefit.facts import activations
from surefit.model import checkpointing
from surefit.model.adapter import add_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.tiling import tile_mlps
from surefit.plan.simulate import record_run
from surefit.plan.trace import Recorder
from surefit.train.loss import loss_sum

TILE = 48
CHUNK = 24


@dataclass(frozen=True)
class Switches:
    checkpointing: Any = False
    tiled: bool = False
    chunked: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.checkpointing, self.tiled, self.chunked))


KINDS = (True, "selective", "offload")
EVERY = [
    Switches(kind, tiled, chunked)
    for kind, tiled, chunked in itertools.product((False, *KINDS), (False, True), (False, True))
]
SAME_SUMS = [switches for switches in EVERY if not switches.tiled and not switches.chunked]
"""Those that add up in the same order as the plain model: there every bit must be the same."""


@pytest.fixture(autouse=True)
def small_chunks_on_one_thread(monkeypatch):
    monkeypatch.setattr(activations, "CHUNK_ROWS", CHUNK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """On a CPU there is nothing to offload to, so numpy is the host here: the recorder does not see its memory."""
    monkeypatch.setattr(checkpointing, "to_host", lambda tensor: tensor.detach().numpy().copy())
    monkeypatch.setattr(checkpointing, "to_device", lambda kept: torch.from_numpy(kept.copy()))


def examples(lengths=(37, 20, 29), vocabulary=families.VOCABULARY):
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, vocabulary, length) for length in lengths]
    return [(row, np.where(np.arange(len(row)) < 8, -100, row)) for row in ids]


def build(family: str, kind: str, switches: Switches, dropout: float = 0.0, **changes: Any) -> Any:
    """A model in training mode whose LoRA factors, where it has some, are not at their start."""
    model: Any = families.build(family, attention_dropout=dropout, **changes)
    if kind == "lora":
        model = add_adapter(model, LoraSection(r=4, lora_dropout=dropout))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1, generator=generator)
    model.train()
    enable_checkpointing(model, switches.checkpointing)
    if switches.tiled:
        tile_mlps(model, TILE)
    return model


def run(model: Any, batch: dict[str, Any], chunked: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a step, and its gradients."""
    torch.manual_seed(11)
    loss = loss_sum(model, batch, chunked) / len(batch["targets"])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(found, expected, exactly: bool) -> None:
    (loss, gradients), (plain_loss, plain) = found, expected
    assert gradients.keys() == plain.keys()
    if exactly:
        assert torch.equal(loss, plain_loss)
        assert [name for name in plain if not torch.equal(gradients[name], plain[name])] == []
        return
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0.0)
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0.0, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_every_combination_learns_the_same(family, kind, packed) -> None:
    batch = collate_packed(examples()) if packed else collate(examples(), 0)
    expected = run(build(family, kind, Switches()), batch, False)
    for switches in EVERY:
        found = run(build(family, kind, switches), batch, switches.chunked)
        assert_equal(found, expected, exactly=switches in SAME_SUMS)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_with_dropout_the_same_numbers_are_drawn_again(family, kind) -> None:
    """Attention and, with LoRA, its input drop the same in the recomputation; tiles drop by tile, so they differ."""
    batch = collate(examples(), 0)
    expected = run(build(family, kind, Switches(), dropout=0.2), batch, False)
    other = run(build(family, kind, Switches(), dropout=0.0), batch, False)
    assert not torch.equal(expected[0], other[0])
    for switches in EVERY:
        if not switches.tiled:
            found = run(build(family, kind, switches, dropout=0.2), batch, switches.chunked)
            assert_equal(found, expected, exactly=switches in SAME_SUMS)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_tiles_with_dropout_recompute_what_they_computed(kind) -> None:
    batch = collate(examples(), 0)
    expected = run(build("llama", kind, Switches(tiled=True), dropout=0.2), batch, False)
    for layers in KINDS:
        found = run(build("llama", kind, Switches(layers, tiled=True), dropout=0.2), batch, False)
        assert_equal(found, expected, exactly=True)


DEEP = {"intermediate_size": 32, "num_hidden_layers": 12}
WIDE = {"intermediate_size": 256, "num_hidden_layers": 4}


def tensors_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def held(model, recorder: Recorder, batch, chunked) -> tuple[int, int]:
    """(most in a step, between its forward and its backward pass): bytes that torch holds beside model and batch."""
    recorder.tag([*model.parameters(), *model.buffers(), *tensors_of(batch).values()], "given")
    recorder.start("forward")
    loss = loss_sum(model, batch, chunked)
    recorder.start("backward")
    loss.backward()
    trace = recorder.trace
    starts = dict(trace.phases)

    def alive(position: int) -> int:
        return sum(trace.allocations[number - 1].bytes for number in trace.live_at(position))

    given = alive(starts["forward"])
    return trace.peak(starts["forward"])[0] - given, alive(starts["backward"]) - given


def bytes_held(switches: Switches, kind: str, tokens: int = 380, **shape: int) -> tuple[int, int]:
    """What `held` says of a step on one row."""
    model = build("llama", kind, switches, max_position_embeddings=512, **shape)
    with Recorder() as recorder:
        return held(model, recorder, collate(examples((tokens,)), 0), switches.chunked)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_recomputing_saves_and_selective_lies_between(kind) -> None:
    found = [bytes_held(Switches(each), kind, **DEEP) for each in (False, "selective", True, "offload")]
    peaks, (_, selective, full, offload) = [peak for peak, _ in found], [kept for _, kept in found]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    # What attention gives is as large as a layer's input here, and the sums of its rows are an eighth of that.
    layer_input = 380 * 32 * 4
    assert selective - full == pytest.approx(12 * 1.125 * layer_input, rel=0.02)
    assert full - offload == pytest.approx(12 * layer_input, rel=0.02)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("layers", [False, True, "selective", "offload"])
def test_tiles_save(layers, kind) -> None:
    whole, tiled = (bytes_held(Switches(layers, each), kind, **WIDE)[0] for each in (False, True))
    assert tiled < 0.7 * whole


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_chunks_save(kind) -> None:
    whole, chunked = (
        bytes_held(Switches(True, chunked=each), kind, vocab_size=2048, **DEEP)[0] for each in (False, True)
    )
    assert chunked < 0.4 * whole


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_fake_tensors_take_the_same_memory(kind, monkeypatch) -> None:
    """The plan runs the real step: what a switch takes and saves is the same there, to the byte."""
    batch = collate(examples((100,)), 0)
    shape = WIDE | {"num_hidden_layers": 2}
    for switches in (*SAME_SUMS, *(Switches(each, tiled=True, chunked=True) for each in (False, *KINDS))):
        expected = bytes_held(switches, kind, 100, **shape)
        with torch.device("meta"):
            model = build("llama", kind, switches, max_position_embeddings=512, **shape)
        (model if kind == "full" else model.get_base_model()).tie_weights()
        found = []

        def step(model, recorder, chunked=switches.chunked, found=found) -> None:
            own = {key: value.clone() for key, value in tensors_of(batch).items()}
            found.append(held(model, recorder, batch | own, chunked))

        with monkeypatch.context() as patch:
            patch.setattr(checkpointing, "to_host", lambda tensor: (tensor.shape, tensor.dtype))
            patch.setattr(checkpointing, "to_device", lambda kept: torch.empty(kept[0], dtype=kept[1]))
            record_run(model, step, padded=False, cuda=False)
        assert found[0] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [True, "selective", "offload"])
def test_on_a_gpu(kind, monkeypatch) -> None:
    """bfloat16, 16 layers: the same loss and gradients as without, and less memory in the order of the kinds."""
    monkeypatch.undo()
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "max_position_embeddings": 4096}
    batch = collate_packed(examples((2000, 2000)))
    peaks, found = [], []
    for switches in (Switches(), Switches(kind)):
        model = build("llama", "full", switches, **shape).to("cuda", torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        found.append(run(model, batch, True))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        del model
    assert peaks[1] < peaks[0]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=0.0)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=2e-2, atol=1e-4, msg=name)
