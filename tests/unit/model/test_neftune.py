"""NEFTune: how strong the noise is for each document, when there is none, and how it goes away."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_run
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel

from surefit.model.neftune import Neftune, document_lengths, noise

ALPHA, WIDTH = 5.0, 32


class Watch:
    """A model whose embeddings' output is kept."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embedded = torch.empty(0)
        model.get_input_embeddings().register_forward_hook(self.keep)

    def keep(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self.embedded = output.detach()

    def __call__(self, seed: int = 0, **inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        self.model(**inputs, use_cache=False)
        return self.embedded


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, tiny_run.VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["plain", "peft", "gpt2"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=64, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, embd_pdrop=0.0)
        yield GPT2LMHeadModel(config).train()
        return
    made = tiny_run.llama().train()
    yield get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj"])) if request.param == "peft" else made


def noise_of(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    """What is added to the embeddings of the inputs."""
    clean = model.get_input_embeddings()(inputs["input_ids"]).detach()
    neftune = Neftune(model, ALPHA)
    added: torch.Tensor = Watch(model)(**inputs) - clean
    neftune.remove()
    return added


def assert_uniform(added: torch.Tensor, length: int) -> None:
    """Uniform within alpha / √(L·d): the largest is near the bound, the mean square a third of its square."""
    bound = ALPHA / math.sqrt(length * WIDTH)
    assert 0.97 * bound < added.abs().max() <= bound * 1.00001
    assert added.square().mean() == pytest.approx(bound**2 / 3, rel=0.15)


def test_padded_rows_have_noise_of_their_own_length(model: Any) -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 10:] = 0
    added = noise_of(model, input_ids=ids(2, 40), attention_mask=mask)
    assert_uniform(added[0], 40)
    assert_uniform(added[1, :10], 10)


def test_packed_documents_have_noise_of_their_own_length(model: Any) -> None:
    positions = torch.cat([torch.arange(8), torch.arange(32), torch.arange(12)])[None]
    added = noise_of(model, input_ids=ids(1, 52), position_ids=positions)
    for start, length in ((0, 8), (8, 32), (40, 12)):
        assert_uniform(added[0, start : start + length], length)


def test_without_mask_and_positions_the_row_is_the_document(model: Any) -> None:
    assert_uniform(noise_of(model, input_ids=ids(2, 20)), 20)


def test_the_decoder_called_by_itself_has_the_noise_of_its_documents() -> None:
    decoder = tiny_run.llama().train()
    clean = decoder.get_input_embeddings()(ids(1, 24)).detach()
    Neftune(decoder, ALPHA)
    watch = Watch(decoder)
    torch.manual_seed(0)
    decoder.model(input_ids=ids(1, 24), position_ids=torch.arange(12).repeat(2)[None], use_cache=False)
    assert_uniform(watch.embedded - clean, 12)


def test_the_same_seed_gives_the_same_noise_and_gradients_flow(model: Any) -> None:
    Neftune(model, ALPHA)
    watch = Watch(model)
    inputs = {"input_ids": ids(2, 16)}
    assert torch.equal(watch(seed=1, **inputs), watch(seed=1, **inputs))
    assert not torch.equal(watch(seed=1, **inputs), watch(seed=2, **inputs))
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_there_is_none_in_eval_mode_and_none_after_removal(model: Any) -> None:
    inputs = {"input_ids": ids(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    clean = model.get_input_embeddings()(inputs["input_ids"]).detach()
    neftune, watch = Neftune(model, ALPHA), Watch(model)
    assert torch.equal(watch(**inputs), clean) is False
    model.eval()
    assert torch.equal(watch(**inputs), clean)
    model.train()
    neftune.remove()
    assert torch.equal(watch(**inputs), clean)
    hooked = [module for module in model.modules() if module._forward_pre_hooks]
    assert hooked == []


def test_it_keeps_the_type_and_needs_no_data() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        embedded = torch.zeros(1, 6, WIDTH, dtype=dtype)
        assert noise(embedded, torch.full((1, 6), 3), ALPHA).dtype == dtype
    with FakeTensorMode():
        lengths = document_lengths({"position_ids": torch.zeros(1, 6, dtype=torch.long)})
        assert lengths is not None
        assert noise(torch.zeros(1, 6, WIDTH), lengths, ALPHA).shape == (1, 6, WIDTH)


def test_a_row_of_padding_alone_is_no_division_by_zero() -> None:
    assert document_lengths({"attention_mask": torch.zeros(1, 3)}) is not None
    lengths = document_lengths({"attention_mask": torch.zeros(1, 3, dtype=torch.long)})
    assert lengths is not None
    assert torch.isfinite(noise(torch.zeros(1, 3, WIDTH), lengths, ALPHA)).all()
