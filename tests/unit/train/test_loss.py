"""The loss is the one transformers computes, from the model's own logits, with the right shift."""

import pytest
import tiny_run
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from surefit.train.loss import summed_cross_entropy, supervised_tokens


def test_by_hand() -> None:
    # Uniform logits over 4 words cost ln 4 a token; the row's first label has nothing before it and does not count.
    logits = torch.zeros(1, 3, 4)
    labels = torch.tensor([[2, 1, 3]])
    assert float(summed_cross_entropy(logits, labels)) == pytest.approx(2 * 1.3862944)
    assert supervised_tokens(labels) == 2


def test_the_entry_at_t_predicts_the_token_at_t_plus_1() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = torch.full((1, 4, 10), -30.0)
    for position, following in enumerate([6, 7, 8]):
        logits[0, position, following] = 30.0
    assert float(summed_cross_entropy(logits, ids)) == pytest.approx(0.0, abs=1e-6)


def test_masked_tokens_cost_nothing_and_an_all_masked_row_is_zero_not_nan() -> None:
    logits = torch.randn(2, 4, 10, requires_grad=True)
    labels = torch.full((2, 4), -100)
    loss = summed_cross_entropy(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 300, 50, dtype=torch.bfloat16)
    labels = torch.randint(0, 50, (1, 300))
    loss = summed_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, summed_cross_entropy(logits.float(), labels))


def gemma2() -> Gemma2ForCausalLM:
    """A softcap on the logits, and one inside the attention."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    )


@pytest.mark.parametrize("build", [tiny_run.llama, gemma2, gpt2])
def test_equals_the_loss_of_transformers(build) -> None:
    torch.manual_seed(0)
    model = build().eval()
    ids = torch.randint(1, 64, (3, 12))
    labels = ids.clone()
    labels[0, :5] = labels[1, 8:] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels, use_cache=False)
        ours = summed_cross_entropy(output.logits, labels) / supervised_tokens(labels)
    torch.testing.assert_close(ours, output.loss, rtol=1e-6, atol=1e-6)
