"""The loss is the one transformers computes, with the right shift; in chunks it is the same, and so are gradients."""

from types import SimpleNamespace

import families
import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from surefit.core.errors import ModelError
from surefit.data.tokens.collate import collate, collate_packed
from surefit.facts import activations
from surefit.facts.activations import chunk_rows
from surefit.plan.simulate import record_run
from surefit.plan.trace import Recorder
from surefit.train.loss import chunked_loss_obstacle, cross_entropy_, loss_sum


def examples(lengths=(14, 9, 11), vocabulary=families.VOCABULARY):
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, vocabulary, length) for length in lengths]
    return [(row, np.where(np.arange(len(row)) < 4, -100, row)) for row in ids]


@pytest.fixture
def small_chunks(monkeypatch) -> int:
    """Five rows a chunk, so that a few sentences make many chunks and an uneven one."""
    monkeypatch.setattr(activations, "CHUNK_ROWS", 5)
    return 5


@pytest.mark.parametrize("chunked", [False, True])
def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(chunked) -> None:
    """By hand: ln 64 a token, and 10 + 5 + 7 tokens stand after the four that are masked."""
    model = families.build("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    loss = loss_sum(model, collate(examples(), 0), chunked)
    assert loss.item() == pytest.approx(22 * 4.1588831, rel=1e-6)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_equals_the_loss_of_transformers(family, chunked) -> None:
    """The shift, the mask and the mean: each of the supervised tokens is predicted from the one before it."""
    model = families.build(family)
    batch = collate(examples(), 0)
    with torch.no_grad():
        shown = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        theirs = model(**shown, labels=batch["labels"], use_cache=False).loss
        ours = loss_sum(model, batch, chunked) / len(batch["targets"])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def loss_and_gradients(model, batch, chunked):
    """Of the mean loss, as a step takes them."""
    model.zero_grad()
    loss = loss_sum(model, batch, chunked)
    (loss / len(batch["targets"])).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), trained


def assert_chunks_change_nothing(model, batch, tolerance=1e-6) -> None:
    """Against the largest number of all gradients: some, such as a key bias's, are zero but for rounding."""
    whole, expected = loss_and_gradients(model, batch, False)
    chunked, found = loss_and_gradients(model, batch, True)
    assert chunked.dtype == torch.float32
    assert chunked.ndim == 0
    torch.testing.assert_close(chunked, whole, rtol=tolerance, atol=0.0)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_chunks_change_neither_loss_nor_gradients(family) -> None:
    model = families.build(family)
    assert chunked_loss_obstacle(model) is None
    assert_chunks_change_nothing(model, collate(examples(), 0))


def with_lora(model, **changes):
    torch.manual_seed(1)
    adapted = get_peft_model(
        model, LoraConfig(**({"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes))
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return adapted


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_lora_also_on_the_head(family, head) -> None:
    targets = {"llama": ["q_proj", "down_proj"], "gemma2": ["q_proj", "down_proj"], "gpt2": ["c_attn"]}[family]
    model = with_lora(families.build(family, tie_word_embeddings=False), target_modules=targets + ["lm_head"] * head)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lm_head" in name for name in trained) == head
    assert_chunks_change_nothing(model, collate(examples(), 0))


@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_lora_on_the_head_alone() -> None:
    model = with_lora(families.build("llama", tie_word_embeddings=False), target_modules=["lm_head"])
    assert_chunks_change_nothing(model, collate(examples(), 0))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "cohere"])
@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_the_head_trained_tied_or_not(family, tied) -> None:
    model = families.build(family, tie_word_embeddings=tied)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert_chunks_change_nothing(model, collate(examples(), 0))


@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_bfloat16_within_its_rounding() -> None:
    """No further from the float32 gradient than the whole logits are, but for a quarter."""
    exact, rounded = families.build("llama"), families.build("llama").bfloat16()
    batch = collate(examples(), 0)
    loss, reference = loss_and_gradients(exact, batch, False)

    def distance(chunked) -> float:
        found, gradients = loss_and_gradients(rounded, batch, chunked)
        torch.testing.assert_close(found, loss, rtol=2e-2, atol=0.0)
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
        errors = [(gradients[name].float() - reference[name]).norm() for name in reference]
        return float(torch.stack(errors).norm())

    assert distance(True) <= 1.25 * distance(False)


@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_a_packed_micro_batch_reaches_the_model_as_it_is(monkeypatch) -> None:
    model = families.build("llama")
    batch = collate_packed(examples())
    seen = {}
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: seen.update(kwargs) or forward(*args, **kwargs))
    loss_sum(model, batch, True)
    assert seen["max_length_q"] == 14
    assert seen["cu_seq_lens_q"] is batch["cu_seq_lens_q"]
    assert seen["use_cache"] is False
    assert "labels" not in seen
    assert_chunks_change_nothing(model, batch)


@pytest.mark.usefixtures("small_chunks")
def test_without_gradients_and_without_targets() -> None:
    model = families.build("llama")
    batch = collate(examples(), 0)
    with torch.no_grad():
        loss = loss_sum(model, batch, True)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, loss_sum(model, batch, False))
    nothing = {**batch, "loss_rows": batch["loss_rows"][:0], "targets": batch["targets"][:0]}
    loss = loss_sum(model, nothing, True)
    loss.backward()
    assert loss.item() == 0.0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("small_chunks", "one_thread")
def test_with_recomputed_layers_and_dropout() -> None:
    model = families.build("llama", attention_dropout=0.3).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = collate(examples(), 0)
    found = []
    for chunked in (False, True):
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, batch, chunked))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_chunked_is_said_and_computed_whole() -> None:
    assert "one module" in (chunked_loss_obstacle(families.build("llama").model) or "")
    prompted = get_peft_model(families.build("llama"), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    assert "prepends tokens" in (chunked_loss_obstacle(prompted) or "")


@pytest.mark.usefixtures("small_chunks", "one_thread")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_routers_loss_is_the_one_transformers_adds(family) -> None:
    routed = families.build(family, output_router_logits=True, router_aux_loss_coef=0.5)
    assert chunked_loss_obstacle(routed) is None
    batch = collate(examples(), 0)
    assert_chunks_change_nothing(routed, batch)
    routed.zero_grad()
    theirs = routed(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    theirs.loss.backward()
    expected = {name: p.grad.clone() for name, p in routed.named_parameters()}
    assert expected["model.layers.0.mlp.gate.weight"].any()
    count, balance = len(batch["targets"]), []
    routed.zero_grad()
    loss = loss_sum(routed, batch, chunked=True, balance=balance) / count
    loss.backward()
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(balance[0] / count, 0.5 * theirs.aux_loss, rtol=1e-6, atol=0)
    for name, parameter in routed.named_parameters():
        atol = 1e-6 * float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=atol, msg=name)
    with torch.no_grad():  # what is measured is the cross-entropy alone
        torch.testing.assert_close(loss_sum(routed, batch, True), loss * count - balance[0])


def test_a_model_that_reads_its_decoder_twice_is_refused() -> None:
    model = families.build("llama")
    forward = model.forward

    def twice(**inputs):
        forward(**inputs)
        return forward(**inputs)

    model.forward = twice
    with pytest.raises(ModelError, match="more than an output head between its decoder and its logits"):
        loss_sum(model, collate(examples(), 0), True)


def test_the_model_is_left_as_it_was() -> None:
    model = families.build("llama")
    before = dict(vars(model.model))
    loss_sum(model, collate(examples(), 0), True).backward()
    assert dict(vars(model.model)) == before
    assert not model.model._forward_hooks


def test_the_gradients_are_given_once() -> None:
    loss = loss_sum(families.build("llama"), collate(examples(), 0), True)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


@pytest.mark.parametrize("trained", ["full", "lora"])
@pytest.mark.usefixtures("one_thread")
def test_nothing_larger_than_a_chunk_of_logits_exists(monkeypatch, trained) -> None:
    """Over a vocabulary so large that logits are the largest tensors there are."""
    vocabulary, rows = 4096, 16
    monkeypatch.setattr(activations, "CHUNK_ROWS", rows)
    model = families.build("llama", vocab_size=vocabulary)
    if trained == "lora":
        model = with_lora(model)
    batch = collate(examples((60, 50), vocabulary), 0)
    chunk = vocabulary * 4 * chunk_rows(len(batch["targets"]), vocabulary, 4)

    def logits_alive(chunked) -> float:
        """At the fullest moment: bytes of logits and whatever else has their rows, in chunks."""
        recorder = Recorder()
        with recorder:
            recorder.start("step")
            loss_sum(model, batch, chunked).backward()
        trace = recorder.trace
        _, at = trace.peak()
        alive = [trace.allocations[number - 1] for number in trace.live_at(at) if number not in trace.tags]
        transposed = "t.default"  # how the head reads its weight
        return sum(a.bytes for a in alive if a.shape[-1:] == (vocabulary,) and a.op != transposed) / chunk

    assert logits_alive(False) > 2 * len(batch["targets"]) / rows
    model.zero_grad()
    assert logits_alive(True) <= 1.1  # the logits, and the one row that showed what the head is


def test_under_fake_tensors(monkeypatch, small_chunks) -> None:
    """The plan runs the real step; the trace of fake tensors is the trace of real ones."""
    batch = collate(examples(), 0)

    def step(model, recorder):
        recorder.start("step")
        own = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
        loss_sum(model, batch | own, True).backward()

    with torch.device("meta"):
        fake = families.build("gemma2")
    fake.tie_weights()
    trace = record_run(fake, step, padded=True, cuda=False)
    logits = [a.shape for a in trace.allocations if a.op.startswith("mm.") and a.shape[-1] == families.VOCABULARY]
    chunks = logits[1:]  # the first is the row that shows what the head is
    assert len(chunks) == -(-len(batch["targets"]) // small_chunks)
    assert all(rows <= small_chunks and vocabulary == 64 for rows, vocabulary in chunks)


def test_a_chunk_is_even_and_bounded() -> None:
    for rows, vocabulary, number in [(1, 64, 4), (16_384, 151_936, 2), (16_385, 32_000, 4), (3000, 262_144, 2)]:
        size = chunk_rows(rows, vocabulary, number)
        limit = min(activations.CHUNK_ROWS, activations.CHUNK_BYTES // (number * vocabulary))
        assert 1 <= size <= limit
        assert -(-rows // size) == -(-rows // limit), "no more chunks than it takes"
        assert -(-rows // size) * size - rows < size
    assert chunk_rows(0, 64, 4) == 0


def test_a_model_without_a_decoder_of_its_own() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace()
    assert chunked_loss_obstacle(model) is not None


def logits_and_targets(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows are sure of the right answer, some of a wrong one by more than float32's exponential can say."""
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    logits[::3].scatter_(1, targets[::3, None], 16.0)
    logits[1::5].scatter_(1, targets[1::5, None], -200.0)
    return logits.to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (7, 97), (300, 1031), (513, 33)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_place_it_is_the_cross_entropy_of_float64(device, rows, vocabulary, dtype) -> None:
    logits, targets = logits_and_targets(rows, vocabulary, dtype)
    exact = logits.to(torch.float64, copy=True).requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="sum")
    expected.backward()
    found = logits.to(device, copy=True)
    loss = cross_entropy_(found, targets.to(device)).cpu()
    alone = cross_entropy_(logits.to(device, copy=True), targets.to(device), differentiate=False).cpu()
    rounding = torch.finfo(dtype).eps
    tolerance = max(torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps, 1e-15)
    torch.testing.assert_close(loss.double(), expected, rtol=4 * tolerance, atol=16 * tolerance)
    assert torch.equal(alone, loss)
    # Number by number, the right answer's too.
    torch.testing.assert_close(found.cpu().double(), exact.grad, rtol=rounding + 32 * tolerance, atol=16 * tolerance)


def test_nothing_but_a_tile_lies_beside_the_logits() -> None:
    """Of 16-bit logits the float32 copy of `LOSS_TILE` rows, of others nothing."""
    vocabulary, rows = 4096, 3 * activations.LOSS_TILE + 1
    for dtype, beside in ((torch.bfloat16, 4 * activations.LOSS_TILE * vocabulary), (torch.float32, 0)):
        logits, targets = logits_and_targets(rows, vocabulary, dtype)
        recorder = Recorder()
        with recorder:
            recorder.start("step")
            cross_entropy_(logits.clone(), targets.clone())
        most = recorder.trace.peak()[0] - logits.nbytes
        assert beside <= most < beside + 64 * rows, dtype


def test_a_head_that_needs_its_logits_for_the_gradient_is_refused() -> None:
    model = families.build("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output.sigmoid())
    with pytest.raises(ModelError, match="needs its logits") as caught:
        loss_sum(model, collate(examples(), 0), True)
    assert "speed.chunked_loss: false" in str(caught.value.help)
    loss_sum(model, collate(examples(), 0), False).backward()
