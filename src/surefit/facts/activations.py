"""What one micro batch keeps in memory, operator by operator: the closed form of `train/step.py` on a GPU.

It covers the decoders whose layers in transformers are Llama's, and LoRA or full training in float32 or 16 bits, with
the attention PyTorch chooses on a GPU. For anything else there is no number here, rather than a guess.

Notation, in bytes per token: b of a number in the model's type; h hidden size, q and k widths of the queries and of the
keys, f width of the MLP, n attention heads, r LoRA's rank, V vocabulary; S tokens of a row, T of the micro batch.

What the forward pass of a layer keeps for its backward pass, with LoRA on all linear layers and without dropout:

    two norms       2 × (4h + 4)      their input in float32 and 1/rms
    their outputs   2 × b h           inputs of q, k, v and of gate, up: each trained layer needs its input
    attention       b (2q + 2k) + 4n  queries, keys, values, output; logsumexp in float32
    MLP             4 × b f           gate, silu(gate), up, and their product
    factors         7 × b r           what lora_A hands to lora_B, in seven layers

Worked example, Llama-3.1-8B (h 4,096, q 4,096, k 1,024, n 32, f 14,336) in bfloat16, r = 8: 2 × 16,388 + 2 × 8,192 +
20,480 + 128 + 114,688 + 112 = 184,568 bytes. 32 layers and the final norm's 16,388, less the first norm's 16,388, which
nothing trained lies below, and the rotary cosines and sines, 512: 5,906,688 bytes per token, 11.27 GiB for one row of
2,048 tokens. The loss adds 12 × V = 1,539,072 bytes per token, 2.94 GiB.

With gradient checkpointing a layer keeps its input only, b h = 8,192 bytes, and one layer at a time is recomputed.

How it differs:
- A padded micro batch needs a mask, so the memory-efficient kernel: keys and values are repeated to the queries' width,
  b q each instead of b k, and each layer keeps the mask as numbers, b S per token. float32 takes the same kernel
  without a mask.
- Full training keeps what the weights' gradients need: b h more per norm. Layers without a LoRA keep no input.
- In float32 a norm's input is the residual stream itself, so the 4h of the first norm is the layer's own input.
- Norms on queries and keys (Qwen3) keep 4 (q + k) + 4 (n + n_kv) more; full training b (q + k) on top.
- Dropout keeps, for each adapted layer, the input it dropped from and one byte per element of mask (CUDA's kernel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefit.core.units import MIB
from surefit.facts.model import DTYPE_BYTES, ModelFacts

FLOAT32 = 4
NORM_TEMPORARIES = 5
"""Float32 copies of its input that the backward pass of an RMS norm has at its fullest."""
TOKEN_BYTES = 3 * 8
"""Ids, mask and labels of a token, int64."""
MASK_MULTIPLE = 8
"""The memory-efficient kernel wants each row of a mask to begin at a multiple of so many numbers."""
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
LLAMA_LIKE = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "SmolLM3ForCausalLM": False,
}
"""The architectures covered, and whether they normalise queries and keys."""


@dataclass(frozen=True)
class MicroBatch:
    """What decides the activations.

    Attributes:
        model: its architecture is one of `LLAMA_LIKE`.
        dtype: of the weights.
        rows, length: examples and the tokens to which all are padded.
        padded: some are shorter.
        checkpointing: activations are recomputed.
        factors: the linear layers of one decoder layer that have LoRA factors, as name → (outputs, inputs); None where
            all weights are trained.
        r, dropout: of the LoRA.
    """

    model: ModelFacts
    dtype: str
    rows: int
    length: int
    padded: bool
    checkpointing: bool
    factors: Mapping[str, tuple[int, int]] | None
    r: int = 0
    dropout: float = 0.0

    @property
    def full(self) -> bool:
        return self.factors is None

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def number(self) -> int:
        """Bytes of a number in the model's type."""
        return DTYPE_BYTES[self.dtype]

    @property
    def query_width(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def key_width(self) -> int:
        return self.model.num_key_value_heads * self.model.head_dim

    @property
    def mlp_width(self) -> int:
        assert self.model.intermediate_size is not None, "covered architectures have one"
        return self.model.intermediate_size

    @property
    def mask_length(self) -> int:
        return -(-self.length // MASK_MULTIPLE) * MASK_MULTIPLE


def covered(model: ModelFacts) -> bool:
    """Whether there is a closed form for this model's activations."""
    return model.architecture in LLAMA_LIKE and model.intermediate_size is not None and not model.quantization


def layer_bytes(batch: MicroBatch) -> int:
    """What the forward pass of one decoder layer keeps, its input's float32 copy included."""
    return _bytes(batch, [*_before_product(batch), *_product(batch)])


def kept_bytes(batch: MicroBatch) -> int:
    """What the whole forward pass keeps: what lives when the loss's backward pass begins, but for the loss's own."""
    model, hidden = batch.model, batch.model.hidden_size
    rope = 2 * batch.number * model.head_dim * batch.length
    if batch.checkpointing:
        mask = batch.rows * batch.length**2 if batch.padded else 0
        inputs = model.num_layers * _bytes(batch, [batch.number * hidden])
        return inputs + final_bytes(batch) + rope + mask + 8 * batch.length
    # Nothing trained lies below the first norm of a LoRA, nor the dropout of its output.
    masks = [hidden for name in ATTENTION_INPUTS if batch.dropout and name in (batch.factors or ())]
    unneeded = 0 if batch.full else _bytes(batch, [*_norm(batch, hidden), *masks])
    return model.num_layers * layer_bytes(batch) - unneeded + final_bytes(batch) + rope


def final_bytes(batch: MicroBatch) -> int:
    """What the final norm and a trained output head keep."""
    hidden = batch.model.hidden_size
    return _bytes(batch, [*_norm(batch, hidden), *([batch.number * hidden] if batch.full else [])])


def layer_backward_bytes(batch: MicroBatch) -> int:
    """One layer at the fullest moment of its backward pass, which is where the MLP's begins.

    The product has given way to its gradient, for which LoRA adds up two parts (three in all); in full training these
    three are the gradients of the product and of its two factors. The gradient of the residual stream waits beside.
    """
    hidden, number = batch.model.hidden_size, batch.number
    held = _bytes(batch, [*_before_product(batch), *3 * [number * batch.mlp_width], number * hidden])
    shared = batch.checkpointing and number == FLOAT32
    return held - (_bytes(batch, [FLOAT32 * hidden]) if shared else 0)


def logits_bytes(batch: MicroBatch) -> int:
    """The loss's backward pass: the log-probabilities, their gradient and the logits' gradient, all in float32."""
    return _bytes(batch, 3 * [FLOAT32 * batch.model.vocab_size])


def norm_backward_bytes(batch: MicroBatch) -> int:
    """The fullest moment of the final norm's backward pass; the output head's input and the norm's output are gone."""
    hidden = batch.model.hidden_size
    done = 2 * batch.number * hidden if batch.full else 0
    return kept_bytes(batch) + (NORM_TEMPORARIES * FLOAT32 * hidden - done) * batch.tokens


def eval_bytes(batch: MicroBatch) -> int:
    """The fullest moment of a forward pass that keeps nothing: the loss, or an MLP."""
    hidden, number = batch.model.hidden_size, batch.number
    copy = 0 if number == FLOAT32 else FLOAT32
    loss = (number + copy + FLOAT32) * batch.model.vocab_size * batch.tokens
    mask = batch.rows * batch.length**2 if batch.padded else 0
    # silu(gate), up and their product; LoRA's part of up beside the base's.
    widths = 3 if batch.full else 4
    return max(loss, number * (4 * hidden + widths * batch.mlp_width) * batch.tokens + mask)


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """What PyTorch gives cuBLAS to work in, per thread: 32 MiB from Hopper on, 8.1 MiB before, nothing on a CPU.

    Source: `getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp, PyTorch 2.11 to 2.13.
    """
    if capability is None:
        return 0
    return 32 * MIB if capability >= (9, 0) else 2 * 4096 * 1024 + 8 * 16 * 1024


def segment_rest(size: int) -> int:
    """Bytes that the caching allocator counts to a tensor beyond its own.

    From 10 MiB on a tensor gets whole pages of 2 MiB, and what is left is a block of its own only above 1 MiB.

    >>> segment_rest(2 * 2560 * 9728) / 2**20, segment_rest(4 * 2**20)
    (0.5, 0)
    """
    rest = -size % (2 * MIB)
    return rest if size >= 10 * MIB and rest <= MIB else 0


def _bytes(batch: MicroBatch, widths: list[int]) -> int:
    """Tensors of so many bytes per token each, as the allocator counts them."""
    return sum(size + segment_rest(size) for size in (batch.tokens * width for width in widths))


def _before_product(batch: MicroBatch) -> list[int]:
    """What a layer keeps before its MLP multiplies: the bytes per token of each tensor, as everything below."""
    hidden = batch.model.hidden_size
    return [
        *_norm(batch, hidden),
        *_inputs(batch, hidden, *ATTENTION_INPUTS),
        *_attention(batch),
        *_norm(batch, hidden),
        *_inputs(batch, hidden, "gate_proj", "up_proj"),
        *3 * [batch.number * batch.mlp_width],
        *len(batch.factors or ()) * [batch.number * batch.r],
    ]


def _product(batch: MicroBatch) -> list[int]:
    return _inputs(batch, batch.mlp_width, "down_proj")


def _norm(batch: MicroBatch, width: int, heads: int = 1) -> list[int]:
    """Its input and 1/rms in float32; the normalised input for the gradient of the weight."""
    return [FLOAT32 * width, FLOAT32 * heads, *([batch.number * width] if batch.full else [])]


def _inputs(batch: MicroBatch, width: int, *layers: str, kept: bool = False) -> list[int]:
    """The common input of linear layers, for the gradients of what is trained in them; `kept`: it is kept anyway."""
    if batch.factors is None:
        return [] if kept else [batch.number * width]
    adapted = sum(name in batch.factors for name in layers)
    if batch.dropout:
        return adapted * [batch.number * width, width]
    return [batch.number * width] if adapted and not kept else []


def _attention(batch: MicroBatch) -> list[int]:
    """Queries, keys, values, output and logsumexp; what norms on queries and keys, and a mask, add."""
    model, query, key = batch.model, batch.query_width, batch.key_width
    flash = batch.number < FLOAT32 and not batch.padded
    heads = (model.num_attention_heads, model.num_key_value_heads)
    kept = [*2 * [batch.number * query], *2 * [batch.number * (key if flash else query)], FLOAT32 * heads[0]]
    if batch.padded:
        kept.append(batch.number * batch.mask_length)
    if LLAMA_LIKE[model.architecture]:
        kept += [*_norm(batch, query, heads[0]), *_norm(batch, key, heads[1])]
    return kept + _inputs(batch, query, "o_proj", kept=True)
