"""A tiled MLP gives what it gave, and whatever may see more than one token is refused."""

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model

from surefit.core.errors import ModelError
from surefit.model.tiling import tile_mlps


def outputs_and_gradients(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    torch.log_softmax(logits, -1)[..., 7].sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def lora(model):
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return adapted


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("tokens", [1, 8, 10])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox"])
@pytest.mark.usefixtures("one_thread")
def test_outputs_and_gradients_stay(family, rows, tokens) -> None:
    """With uneven tiles, and tiles that reach over two rows."""
    ids = torch.randint(3, 64, (rows, 25), generator=torch.Generator().manual_seed(0))
    for adapt in (lambda model: model, lora):
        model = adapt(families.build(family))
        logits, expected = outputs_and_gradients(model, ids)
        assert tile_mlps(model, tokens) == 2
        tiled, gradients = outputs_and_gradients(model, ids)
        torch.testing.assert_close(tiled, logits, rtol=1e-5, atol=1e-6)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0.0, atol=1e-6 * largest, msg=name)


def test_names_and_weights_stay() -> None:
    model = families.build("llama")
    names = [name for name, _ in model.named_modules()]
    state = model.state_dict()
    tile_mlps(model, 4)
    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == state.keys()


def test_the_mlp_sees_one_tile_at_a_time() -> None:
    model = families.build("llama")
    tile_mlps(model, 8)
    seen = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    with torch.no_grad():
        model(input_ids=torch.ones((1, 20), dtype=torch.long), use_cache=False)
    assert seen == [(1, 8, 48), (1, 8, 48), (1, 4, 48)]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mixtral", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
        ("bloom", "takes hidden_states, residual"),
        ("opt", "no decoder layer has a module named mlp"),
    ],
)
def test_what_is_not_one_mlp_per_layer_is_refused(family, why) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        tile_mlps(families.build(family), 8)
    assert caught.value.field == "speed.tiled_mlp"


def test_a_convolution_over_tokens_is_refused() -> None:
    model = families.build("llama")
    model.model.layers[1].mlp.shift = torch.nn.Conv1d(32, 32, 3)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp has a part, shift \(Conv1d\)"):
        tile_mlps(model, 8)
    assert "forward" not in vars(model.model.layers[0].mlp)
