"""Bytes of activations that one micro batch keeps, operator by operator: the closed form of `train/step.py` on a GPU.

It covers decoders whose layers in transformers are Llama's, and LoRA or full training in float32 or 16 bits, with the
attention kernel that PyTorch chooses on a GPU. For anything else it gives no number, rather than a guess.

Notation, in bytes per token: b bytes of a number in the model's dtype; h hidden size; q and k widths of the queries
and of the keys; f width of the MLP; n attention heads; r LoRA rank; V vocabulary size; S tokens of a row; T tokens of
the micro batch.

The forward pass of a layer keeps these tensors for its backward pass, with LoRA on all linear layers and no dropout:

    two norms       2 × (4h + 4)      their input in float32 and 1/rms
    their outputs   2 × b h           inputs of q, k, v and of gate, up: each trained layer needs its input
    attention       b (2q + 2k) + 4n  queries, keys, values, output; logsumexp in float32
    MLP             4 × b f           gate, silu(gate), up, and their product
    factors         7 × b r           output of lora_A, which is the input of lora_B, in seven layers

Worked example, Llama-3.1-8B (h 4,096, q 4,096, k 1,024, n 32, f 14,336) in bfloat16, r = 8: 2 × 16,388 + 2 × 8,192 +
20,480 + 128 + 114,688 + 112 = 184,568 bytes. 32 layers and the final norm's 16,388, less the first norm's 16,388, as
nothing below it is trained, and the rotary cosines and sines, 512: 5,906,688 bytes per token, 11.27 GiB for one row of
2,048 tokens. The loss adds 2,047 hidden states and their gradients, 2 × 8,192 bytes each, 0.03 GiB; and a chunk of
2,047 rows of logits of b V = 256,512 bytes each, and for a moment 256 of them in float32, 4 V = 513,024 bytes each,
0.61 GiB. With the logits of all tokens held at once it would be 12 × V bytes per token, 2.93 GiB.

With gradient checkpointing a layer keeps its input only, b h = 8,192 bytes, and one layer at a time is recomputed;
selective checkpointing keeps b q + 4n more; offloading keeps nothing on the GPU.

Variants:
- A padded micro batch needs a mask, hence the memory-efficient kernel: keys and values are repeated to the queries'
  width, b q each instead of b k, and each layer keeps the mask as numbers, b S per token. float32 uses the same kernel
  without a mask.
- bfloat16 before Ampere uses the math kernel: queries, keys and values in float32, 4 q each, and 4 n S of weights.
- Full training keeps what the weights' gradients need: b h more per norm. Layers without a LoRA keep no input.
- In float32 a norm's input is the residual stream itself, so the 4h of the first norm is the layer's own input.
- Norms on queries and keys (Qwen3) keep 4 (q + k) + 4 (n + n_kv) more; full training b (q + k) on top.
- Dropout keeps, for each adapted layer, its input before dropout and one byte per element of mask (CUDA's kernel);
  fused factors keep the input once.
- Packed examples are one row without a mask. Where no kernel supports them (before Ampere, float32) each is read
  alone, by the memory-efficient kernel, and the results are joined: b q more.
- A tiled MLP keeps its input, and its inner tensors exist for one tile at a time.
- A quantized matrix is dequantized for each product with it.
- Fused kernels (`model/kernels.py`) keep a norm's input in its own dtype, b instead of 4, and for the first norm
  nothing besides the layer's own input; for an MLP with silu they do not keep silu(gate): 3 × b f.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from surefit.core.units import MIB
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sdpa import AttentionCall, Kernel, select_kernel

FLOAT32 = 4
NORM_TEMPORARIES = 5
"""Number of float32 copies of its input that the backward pass of an RMS norm has at its peak."""
TOKEN_BYTES = 4 * 8
"""Bytes per token moved to the GPU: its id, its mask or position, its place in the loss and its target, all int64."""
CHUNK_ROWS, CHUNK_BYTES = 2_048, 640 * MIB
"""Rows of logits that the loss computes at a time, and their limit in bytes. The gradient of 2,048 hidden states of
2,048 numbers is a product of 256 tiles of 128 × 128, so that each of an H200's 132 multiprocessors has one; more rows
gain nothing. In 16 bits they need 501 MiB for a vocabulary of 128,256 and 594 MiB for 151,936; with 262,144 entries, or
in float32, there are fewer rows: 1,280, or 1,104 for 151,936."""
LOSS_TILE = 256
"""Rows of 16-bit logits that are copied to float32 at a time. A thread block handles a row, so with fewer rows than
multiprocessors some would have nothing to do; 256 take 125 MiB for a vocabulary of 128,256."""
TILE = 4_096
"""Tokens per tile of a tiled MLP."""
AMPERE, ADA = (8, 0), (8, 9)
"""Compute capabilities of the first GPUs with flash attention, and of the first that multiply float8."""
MASK_MULTIPLE = 8
"""The memory-efficient kernel needs each row of a mask to begin at a multiple of this many numbers."""
ATTENTION_INPUTS, MLP_INPUTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
SILU = (None, "silu", "swish")
"""Names in config.json of the activation of MLPs that have a kernel; without a name, it is silu in every architecture
of `LLAMA_LIKE`."""
MOST_RANK = 128
"""Largest rank at which LoRA's part is computed inside that kernel; above it, the product itself dominates the time."""
FLOAT8 = 1
"""Bytes of a number in float8, the input of a product; the scaled copy in the model's dtype that it is rounded from
exists beside it."""
LLAMA_LIKE = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "SmolLM3ForCausalLM": False,
}
"""The architectures covered, and whether they normalize queries and keys."""


@dataclass(frozen=True)
class MicroBatch:
    """The properties of a micro batch, its model and its GPU that determine the activations' size.

    Attributes:
        model: the model; its architecture is one of `LLAMA_LIKE`.
        dtype: dtype of the weights.
        rows, length: examples, and the tokens to which all are padded.
        padded: some examples are shorter than `length`.
        checkpointing: value of `train.gradient_checkpointing`: what is recomputed.
        factors: the linear layers of one decoder layer that have LoRA factors, as name → (outputs, inputs); None where
            all weights are trained.
        r, dropout: rank and dropout of the LoRA.
        packed: the examples lie one after the other.
        chunked, fused, tiled: `speed.chunked_loss`, `speed.fused_lora` and `speed.tiled_mlp`.
        quantization: quantization of the frozen weights.
        capability: compute capability of the GPU.
        kernels: norms, rope and gated MLPs run in fused kernels, `speed.kernels`.
        reach: keys that attention reads, per token of this micro batch; above 1 where other processes have some of
            them, and where two answers read the same prompt.
    """

    model: ModelFacts
    dtype: str
    rows: int
    length: int
    padded: bool
    checkpointing: bool | Literal["selective", "offload"]
    factors: Mapping[str, tuple[int, int]] | None
    r: int = 0
    dropout: float = 0.0
    packed: bool = False
    chunked: bool = True
    fused: bool = False
    tiled: bool = False
    quantization: str = "none"
    capability: tuple[int, int] | None = (8, 0)
    kernels: bool = False
    reach: float = 1.0

    @property
    def full(self) -> bool:
        return self.factors is None

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def targets(self) -> int:
        """Number of tokens that the loss counts, at most."""
        return max(1, self.rows * (self.length - 1))

    @property
    def kernel(self) -> Kernel:
        """Kernel that attention runs in, with as many key heads as query heads where the kernel needs that."""
        width = self.model.head_dim
        return select_kernel(AttentionCall(self.capability or AMPERE, self.dtype, width, width, masked=self.padded))

    @property
    def flash(self) -> bool:
        """Return whether attention is one kernel that supports fewer key heads than query heads."""
        return self.kernel == "flash"

    @property
    def logits(self) -> int:
        """Numbers of attention logits held per token, where the kernel materializes all logits; else 0."""
        return round(self.model.num_attention_heads * self.length * self.reach) if self.kernel == "math" else 0

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
    def one_kernel(self) -> bool:
        """Return whether silu(gate) · up is one kernel."""
        return self.kernels and self.model.activation in SILU

    @property
    def gated(self) -> bool:
        """Return whether that kernel adds LoRA's part too, so that both layers share one autograd function."""
        adapted = all(name in (self.factors or ()) for name in MLP_INPUTS)
        return self.one_kernel and self.fused and adapted and not self.dropout and self.r <= MOST_RANK

    @property
    def mask_length(self) -> int:
        return -(-self.length // MASK_MULTIPLE) * MASK_MULTIPLE


def has_closed_form(model: ModelFacts) -> bool:
    """Return whether there is a closed form for this model's activations."""
    return model.architecture in LLAMA_LIKE and model.intermediate_size is not None and not model.quantization


def shared_tokens(batch: MicroBatch, parts: int) -> MicroBatch:
    """Return the part of a micro batch that one of several processes holds in context parallelism
    (`parallel/context_parallel.py`): T / n tokens and one of padding. It reads the keys of the documents in its front
    piece and in its last piece up to the end of these pieces.

    Of n processes and a document of T tokens the first has pieces 1 and 2n of 2n, so it reads T / 2n and T keys.
    """
    if parts == 1:
        return batch
    tokens = -(-batch.tokens // parts) + 1
    reach = batch.tokens * (1 + 1 / (2 * parts)) / tokens
    return replace(batch, rows=1, length=tokens, padded=False, packed=True, reach=reach)


def layer_bytes(batch: MicroBatch) -> int:
    """Return the bytes that the forward pass of one decoder layer keeps, including its input's float32 copy."""
    product = [] if batch.tiled else _inputs(batch, batch.mlp_width, "down_proj")
    return _bytes(batch, [*_before_product(batch), *product])


def kept_bytes(batch: MicroBatch) -> int:
    """Return the bytes that the whole forward pass keeps for its backward pass, without the loss's own."""
    model, hidden = batch.model, batch.model.hidden_size
    rope = 2 * batch.number * model.head_dim * (batch.tokens if batch.packed else batch.length)
    if batch.checkpointing:
        mask = batch.rows * batch.length**2 if batch.padded else 0
        inputs = 0 if batch.checkpointing == "offload" else _bytes(batch, [batch.number * hidden])
        kept = model.num_layers * (inputs + attention_kept_bytes(batch))
        return kept + final_bytes(batch) + rope + mask + 8 * batch.length
    # Nothing below the first norm of a LoRA is trained, nor is the dropout of its output (whose mask is kept if fused).
    dropped = batch.dropout and not batch.fused
    masks = [hidden for name in ATTENTION_INPUTS if dropped and name in (batch.factors or ())]
    unneeded = 0 if batch.full else _bytes(batch, [*_norm(batch, hidden), *masks])
    return model.num_layers * layer_bytes(batch) - unneeded + final_bytes(batch) + rope


def attention_kept_bytes(batch: MicroBatch) -> int:
    """Return the bytes of a layer that selective checkpointing keeps besides its input: attention's output and its
    logsumexp. The math kernel is not one operator, so its output cannot be kept."""
    if batch.checkpointing != "selective" or batch.logits:
        return 0
    return _bytes(batch, [batch.number * batch.query_width, FLOAT32 * batch.model.num_attention_heads])


def final_bytes(batch: MicroBatch) -> int:
    """Return the bytes that the final norm and a trained output head keep; a chunked loss has its gradients already."""
    hidden = batch.model.hidden_size
    head = [batch.number * hidden] if batch.full and not batch.chunked else []
    return _bytes(batch, [*_norm(batch, hidden), *head])


def layer_backward_bytes(batch: MicroBatch) -> int:
    """Return the bytes of one layer at the peak of its backward pass, which is at the beginning of the MLP's.

    The product has been freed and its gradient exists, for which LoRA adds up two parts (three tensors in all); in full
    training these three are the gradients of the product and of its two factors. The gradient of the residual stream is
    held beside them.
    """
    hidden, number = batch.model.hidden_size, batch.number
    peak = _bytes(batch, [*_before_product(batch), number * hidden])
    # The backward pass of the norm before the tiles, whose output is freed by then.
    norm = _bytes(batch, [(_norm_backward(batch) - number) * hidden]) if batch.tiled else 0
    peak = max(peak + max(_mlp_backward(batch), norm), _attention_backward(batch))
    input_is_kept = batch.checkpointing and (batch.kernels or number == FLOAT32)
    return peak - (_bytes(batch, [number * hidden]) if input_is_kept else 0)


def _attention_backward(batch: MicroBatch) -> int:
    """Return the bytes of one layer during attention's backward pass, which is its peak where the MLP runs in tiles:
    the gradients of its output, queries, keys and values, and the kernel's own buffers (source: plan/cuda.py). The math
    kernel's peak is the softmax of its forward pass: logits, their softmax and the boolean mask of rows without one,
    beside what is kept, and its inputs in float32."""
    model, number = batch.model, batch.number
    hidden, query, key = model.hidden_size, batch.query_width, batch.key_width
    heads, width = model.num_attention_heads, model.head_dim
    kernel_buffers = [FLOAT32 * heads]
    other_tensors = [
        *_norm(batch, hidden),
        *_inputs(batch, hidden, *ATTENTION_INPUTS),
        *_attention(batch),
        number * hidden,
    ]
    if batch.logits:  # the math kernel computes one example at a time where they are packed
        per_token = FLOAT32 * (query + 2 * key) + (2 * FLOAT32 + 1) * batch.logits
        return per_token * (batch.length if batch.packed else batch.tokens) + _bytes(
            batch, [*other_tensors, *3 * [number * query]]
        )
    if batch.flash:
        kernel_buffers += [FLOAT32 * heads * -(-width // 32) * 32, *(2 * [_read(batch, query)] if key != query else [])]
    elif number < FLOAT32:
        kernel_buffers.append(3 * FLOAT32 * heads * -(-width // 64) * 64)
    return _bytes(
        batch,
        [*other_tensors, *kernel_buffers, *2 * [number * query], *2 * [_read(batch, key if batch.flash else query)]],
    )


def _mlp_backward(batch: MicroBatch) -> int:
    """Return the bytes of an MLP at the peak of its backward pass besides what a layer keeps. The mask of the product's
    dropout is needed for the last of the three gradients. In tiles: all tensors of the last tile beside the gradients
    of the other tiles, or the gradients of all tiles and their concatenation."""
    width, number = batch.mlp_width, batch.number
    tokens = min(TILE, batch.tokens) if batch.tiled else batch.tokens
    kept = _mlp_tensors(batch) * number * width if batch.tiled else 0
    weights = dequantized_bytes(batch, batch.model.hidden_size, width)
    gradients = max(3 * number * width, 2 * number * width + -(-weights // tokens))
    if batch.gated:  # the gradients of gate, up and the product stay until their autograd function returns
        gradients = 3 * number * width + number * batch.model.hidden_size + -(-weights // tokens)
    mask = width if batch.dropout and "down_proj" in (batch.factors or ()) else 0
    peak, hidden = tokens * (kept + gradients + mask), number * batch.model.hidden_size
    return max(peak + hidden * (batch.tokens - tokens), 2 * hidden * batch.tokens) if batch.tiled else peak


def forward_bytes(batch: MicroBatch) -> int:
    """Return the bytes at the last MLP of the forward pass where its input is scaled to float8 for the product; else 0,
    for then another moment is the peak."""
    if batch.quantization != "fp8" or (batch.capability or AMPERE) < ADA or batch.checkpointing or batch.tiled:
        return 0
    hidden = batch.number * batch.model.hidden_size
    return kept_bytes(batch) - final_bytes(batch) + ((batch.number + FLOAT8) * batch.mlp_width + hidden) * batch.tokens


def dequantized_bytes(batch: MicroBatch, outputs: int, inputs: int) -> int:
    """Return the bytes of a quantized matrix's dequantized copy, which exists during a product with it."""
    numbers = outputs * inputs
    match batch.quantization:
        case "nf4":
            return numbers * batch.number + 2 * FLOAT32 * numbers // 64
        case "fp8":
            return numbers * batch.number
        case _:
            return 0


def logits_bytes(batch: MicroBatch) -> int:
    """Return the bytes of the loss's backward pass in float32: log-probabilities, their gradient and the logits'."""
    if batch.chunked:
        return _chunked_bytes(batch)
    return 3 * FLOAT32 * batch.model.vocab_size * batch.targets


def chunk_rows(targets: int, vocabulary: int, number: int) -> int:
    """Return the rows of the largest chunk that `train/loss.py` cuts this many targets into, all as even as can be.
    `number` is the bytes of a logit.

    >>> chunk_rows(1_000, 151_936, 2), chunk_rows(16_385, 32_000, 2), chunk_rows(2_000, 262_144, 2)
    (1000, 1821, 1000)
    """
    limit = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (number * vocabulary)))
    return -(-targets // max(1, -(-targets // limit)))


def _chunk_bytes(batch: MicroBatch) -> tuple[int, int]:
    """Return the bytes of the largest chunk's logits, which become their gradient, and of the tile beside them before
    that: the float32 copy of some rows where the logits are in 16 bits."""
    vocabulary, number = batch.model.vocab_size, batch.number
    rows = chunk_rows(batch.targets, vocabulary, number)
    tile = min(rows, LOSS_TILE) if number < FLOAT32 else 0
    return number * vocabulary * rows, FLOAT32 * vocabulary * tile


def _chunked_bytes(batch: MicroBatch) -> int:
    """Return the bytes of a chunked loss: one chunk; the hidden states of all targets, and their gradients; where the
    head is trained, its gradient in its own dtype and summed in float32."""
    model, number = batch.model, batch.number
    states = 2 * number * model.hidden_size * batch.targets
    logits, tile = _chunk_bytes(batch)
    if not batch.full:
        return states + logits + tile
    matrix = model.vocab_size * model.hidden_size
    chunk = max(logits + tile, logits + number * matrix)
    if chunk_rows(batch.targets, model.vocab_size, number) < batch.targets:
        return states + FLOAT32 * matrix + chunk
    return states + max(chunk, (FLOAT32 + number) * matrix if number < FLOAT32 else 0)


def norm_backward_bytes(batch: MicroBatch) -> int:
    """Return the bytes at the peak of the final norm's backward pass, when the output head's input and the norm's
    output are freed."""
    hidden = batch.model.hidden_size
    freed = (not batch.chunked) + (not batch.kernels) if batch.full else 0
    return kept_bytes(batch) + (_norm_backward(batch) - freed * batch.number) * hidden * batch.tokens


def _norm_backward(batch: MicroBatch) -> int:
    """Return the bytes of a norm's backward pass at its peak per number of its input; a kernel's are two gradients."""
    return 2 * batch.number if batch.kernels else NORM_TEMPORARIES * FLOAT32


def eval_bytes(batch: MicroBatch, loss: bool = True) -> int:
    """Return the peak bytes of a forward pass without gradients: at the loss or an MLP; without the loss the MLP's."""
    hidden, number = batch.model.hidden_size, batch.number
    copy = 0 if number == FLOAT32 else FLOAT32
    vocabulary = batch.model.vocab_size
    if batch.chunked:
        states = number * hidden * batch.targets
        loss_bytes = states + sum(_chunk_bytes(batch))
    else:
        loss_bytes = vocabulary * max(
            number * (batch.tokens + batch.targets),
            (number + copy) * batch.targets,
            (copy or FLOAT32 + copy) * batch.targets,
        )
    mask = batch.rows * batch.length**2 if batch.padded else 0
    # silu(gate), up and their product; LoRA's part of up beside the base's.
    widths = 3 if batch.full else 4
    return max(loss_bytes if loss else 0, number * (4 * hidden + widths * batch.mlp_width) * batch.tokens + mask)


def cublas_workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS's workspace per thread: 32 MiB from Hopper on, 8.1 MiB before, 0 on a CPU.

    Source: `getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp, PyTorch 2.11 to 2.13.
    """
    if capability is None:
        return 0
    return 32 * MIB if capability >= (9, 0) else 2 * 4096 * 1024 + 8 * 16 * 1024


def segment_rest(size: int) -> int:
    """Return the bytes that the caching allocator adds to a tensor's own.

    From 10 MiB on a tensor gets whole pages of 2 MiB, and the remainder is a block of its own only above 1 MiB.

    >>> segment_rest(2 * 2560 * 9728) / 2**20, segment_rest(4 * 2**20)
    (0.5, 0)
    """
    remainder = -size % (2 * MIB)
    return remainder if size >= 10 * MIB and remainder <= MIB else 0


def _bytes(batch: MicroBatch, widths: list[int]) -> int:
    """Return the bytes of tensors with these bytes per token each, as the allocator counts them."""
    return sum(size + segment_rest(size) for size in (batch.tokens * width for width in widths))


def _before_product(batch: MicroBatch) -> list[int]:
    """Return the bytes per token of each tensor that a layer keeps before its MLP multiplies gate and up; the functions
    below count in the same unit."""
    hidden = batch.model.hidden_size
    mlp = [*_inputs(batch, hidden, *MLP_INPUTS), *_mlp_tensors(batch) * [batch.number * batch.mlp_width]]
    factors = set(batch.factors or ())
    if batch.tiled:
        mlp, factors = [batch.number * hidden], factors - {*MLP_INPUTS, "down_proj"}
    return [
        *_norm(batch, hidden),
        *_inputs(batch, hidden, *ATTENTION_INPUTS),
        *_attention(batch),
        *_norm(batch, hidden),
        *mlp,
        *len(factors) * [batch.number * batch.r],
    ]


def _mlp_tensors(batch: MicroBatch) -> int:
    """Return how many tensors of the MLP's width exist before the product: gate, silu(gate) and up; a kernel keeps no
    silu(gate)."""
    return 2 if batch.one_kernel else 3


def _norm(batch: MicroBatch, width: int, heads: int = 1) -> list[int]:
    """Return the bytes per token that a norm keeps: its input and 1/rms in float32, and the normalized input for the
    gradient of the weight. A kernel keeps its input in the model's dtype, and 1/rms."""
    if batch.kernels:
        return [batch.number * width, FLOAT32 * heads]
    return [FLOAT32 * width, FLOAT32 * heads, *([batch.number * width] if batch.full else [])]


def _inputs(batch: MicroBatch, width: int, *layers: str, kept: bool = False) -> list[int]:
    """Return the bytes per token of linear layers' common input, kept for the gradients of the weights trained in them.
    `kept`: another operator keeps it anyway."""
    if batch.factors is None:
        return [] if kept else [batch.number * width]
    adapted = sum(name in batch.factors for name in layers)
    if batch.dropout and batch.fused:
        return [*([batch.number * width] if adapted and not kept else []), *adapted * [width]]
    if batch.dropout:
        return adapted * [batch.number * width, width]
    return [batch.number * width] if adapted and not kept else []


def _attention(batch: MicroBatch) -> list[int]:
    """Return the bytes per token that attention keeps: queries, keys, values, output and logsumexp, and the extra
    tensors for norms on queries and keys and for a mask."""
    model, query, key = batch.model, batch.query_width, batch.key_width
    heads = (model.num_attention_heads, model.num_key_value_heads)
    kept = [*2 * [batch.number * query], *2 * [_read(batch, key if batch.flash else query)], FLOAT32 * heads[0]]
    if batch.logits:  # all in float32, without the output: queries, keys, values and the weights
        kept = [FLOAT32 * query, *2 * [FLOAT32 * round(query * batch.reach)], FLOAT32 * batch.logits]
    elif batch.padded:
        kept.append(batch.number * batch.mask_length)
    if LLAMA_LIKE[model.architecture]:
        kept += [*_norm(batch, query, heads[0]), *_norm(batch, key, heads[1])]
    # Without a kernel for packed examples, their outputs are joined after each was attended to alone.
    return kept + _inputs(batch, query, "o_proj", kept=not batch.logits and (not batch.packed or batch.flash))


def _read(batch: MicroBatch, width: int) -> int:
    """Return the bytes per token of this process of keys or values of this width, counting all that it reads."""
    return round(batch.number * width * batch.reach)
