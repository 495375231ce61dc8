"""What is kept and what is recomputed, layer by layer; that results stay is shown in tests/numerics."""

from collections import Counter

import families
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from surefit.model import checkpointing
from surefit.model.checkpointing import enable_checkpointing

SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LINEAR = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def calls_in_backward(kind, **changes) -> tuple[Counter, int]:
    """The operators of the backward pass, and the layers."""
    model = families.build("llama", **changes).train()
    enable_checkpointing(model, kind)
    ids = torch.arange(3, 33).view(2, 15)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Counting() as mode:
        loss.backward()
    return mode.calls, model.config.num_hidden_layers


def test_full_recomputes_attention_and_selective_does_not() -> None:
    plain, layers = calls_in_backward(False)
    full, _ = calls_in_backward(True)
    selective, _ = calls_in_backward("selective")
    offload, _ = calls_in_backward("offload")
    assert (plain[SDPA], full[SDPA], selective[SDPA], offload[SDPA]) == (0, layers, 0, layers)
    products = [sum(calls[op] for op in LINEAR) for calls in (plain, full, selective)]
    # Without the early stop at the last tensor that is needed: the last projection of a layer is never recomputed.
    assert products[1] == products[2] == products[0] + layers * 6


def test_attention_that_draws_random_numbers_is_recomputed() -> None:
    assert checkpointing._keep_attention(None, SDPA, 1, 2, 3) == CheckpointPolicy.MUST_SAVE
    assert checkpointing._keep_attention(None, SDPA, 1, 2, 3, 0.0, True) == CheckpointPolicy.MUST_SAVE
    assert checkpointing._keep_attention(None, SDPA, 1, 2, 3, 0.1, True) == CheckpointPolicy.PREFER_RECOMPUTE
    assert checkpointing._keep_attention(None, SDPA, 1, 2, 3, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert checkpointing._keep_attention(None, efficient, 1, 2, 3, None, True) == CheckpointPolicy.MUST_SAVE
    assert checkpointing._keep_attention(None, efficient, 1, 2, 3, None, True, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert checkpointing._keep_attention(None, torch.ops.aten.mm.default, 1, 2) == CheckpointPolicy.PREFER_RECOMPUTE


def test_the_operator_of_packed_attention_is_kept() -> None:
    import torch.nn.attention.varlen  # registers the operator

    operator = torch.ops.torch_attn._varlen_attn.default
    arguments = [argument.name for argument in operator._schema.arguments]
    assert "dropout_p" not in arguments
    assert checkpointing._keep_attention(None, operator, *range(len(arguments))) == CheckpointPolicy.MUST_SAVE


def test_offload_takes_the_layers_inputs_and_nothing_else(monkeypatch) -> None:
    taken, given = [], []

    def to_host(tensor):
        taken.append(tuple(tensor.shape))
        return [tensor.detach().clone()]

    def to_device(kept):
        given.append(tuple(kept[0].shape))
        return kept[0]

    monkeypatch.setattr(checkpointing, "to_host", to_host)
    monkeypatch.setattr(checkpointing, "to_device", to_device)
    _, layers = calls_in_backward("offload", attention_dropout=0.1)
    assert taken == given == [(2, 15, 32)] * layers


def test_on_a_cpu_the_tensor_stays_where_it_is() -> None:
    tensor = torch.randn(3)
    kept = checkpointing.to_host(tensor)
    assert not isinstance(kept, torch.Tensor)
    assert checkpointing.to_device(kept) is tensor


@pytest.mark.parametrize("kind", [True, "selective", "offload"])
def test_a_frozen_embedding_gets_no_gradient_of_its_output(kind) -> None:
    model = families.build("llama").train()
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad = True
    enable_checkpointing(model, kind)
    outputs = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: outputs.append(output))
    ids = torch.arange(3, 33).view(2, 15)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert not outputs[0].requires_grad
    assert model.model.layers[0].mlp.up_proj.weight.grad.any()


def test_false_changes_nothing() -> None:
    model = families.build("llama")
    enable_checkpointing(model, False)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_model_without_the_switch_says_so() -> None:
    model = families.build("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="does not support"):
        enable_checkpointing(model, True)


@pytest.mark.gpu
def test_on_a_gpu_the_copy_has_the_same_bits_and_the_memory_is_free() -> None:
    tensors = [torch.randn(1024, 1024, device="cuda") for _ in range(4)]
    copies = [tensor.clone() for tensor in tensors]
    before = torch.cuda.memory_allocated()
    kept = [checkpointing.to_host(tensor) for tensor in tensors]
    tensors.clear()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before - 4 * 4 * 1024**2
    for position in (3, 2, 1, 0):
        assert torch.equal(checkpointing.to_device(kept[position]), copies[position])
