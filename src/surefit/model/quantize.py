"""Frozen weights in fewer bits: NF4 through bitsandbytes, FP8 by a layer of our own.

NF4 (Dettmers et al. 2023, QLoRA): 4 bits per weight and a scale per 64 of them, the scales themselves in 8 bits: 4.127
bits per weight. FP8: 8 bits per weight (1 sign, 4 exponent, 3 mantissa) and a float32 scale per output. Embeddings and
the output head stay as they are, routers and layers for images or sound, and the adapter's factors.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefit.core.errors import MachineError
from surefit.core.packaging import install_extra
from surefit.facts.all_linear import is_quantizable
from surefit.model import float8_ops
from surefit.model.compat import keep_four_bit_layout
from surefit.model.float8_ops import FP8, FP8_MAX, TINY

FIELD = "model.quantization"
BLOCK, BLOCKS = 64, 256
"""Weights per NF4 scale, and scales per scale of the scales: what bitsandbytes does unless told otherwise."""


def quantization_config(dtype: torch.dtype, model: PreTrainedModel) -> BitsAndBytesConfig:
    """What `from_pretrained` is given as `quantization_config` for NF4.

    Args:
        dtype: of everything that is not quantised, and of the arithmetic.
        model: the one that is loaded, without its weights.

    Raises:
        MachineError: nf4 without bitsandbytes or accelerate.
    """
    _require_bitsandbytes()
    chosen = {id(layer) for _, _, layer in _layers(model)}
    others = [name for name, layer in model.named_modules() if _is_matrix(layer) and id(layer) not in chosen]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        # A pattern: a plain name would leave out all that begin or end with it.
        llm_int8_skip_modules=[f"(?:{'|'.join(map(re.escape, others))})$"],
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=torch.uint8,
    )


def finish_loading(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """What is to be done with a model that transformers has loaded with `quantization_config`, in place.

    Args:
        kind: `model.quantization`. fp8: the model is quantised here, on whatever device it is.
    """
    if kind == "nf4":
        keep_four_bit_layout(model)
    if kind == "fp8":
        for parent, name, layer in _layers(model):
            setattr(parent, name, Float8Linear.of(layer))
    return model


def quantize_meta(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Give a model on the meta device the layers it would have after loading with this quantisation, in place.

    Every tensor has the size and type it has on a real device. Those of NF4's quantisation state are neither parameters
    nor buffers: `hidden_tensors` finds them. PEFT must be told that the model is 4-bit, as loading does
    (`model.is_loaded_in_4bit`), which this sets.

    Args:
        model: on meta, without an adapter.
        kind: none, nf4 or fp8.

    Raises:
        MachineError: nf4 without bitsandbytes.
    """
    if kind == "nf4":
        _require_bitsandbytes()
        for parent, name, layer in _layers(model):
            setattr(parent, name, _four_bit_on_meta(layer))
        model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return finish_loading(model, kind)


def hidden_tensors(model: torch.nn.Module) -> Iterator[tuple[str, object, str, torch.Tensor]]:
    """The tensors of NF4's quantisation states, which no module lists: (module's name, owner, attribute, tensor).

    `setattr(owner, attribute, other)` replaces one. A module with n weights has uint8 absmax (n/64), float32 code (16)
    and offset (), and, of the scales' own state, float32 absmax (n/64/256) and code (256).
    """
    for name, module in model.named_modules():
        state = getattr(module._parameters.get("weight"), "quant_state", None)
        for owner in (state, getattr(state, "state2", None)):
            for attribute in ("absmax", "code", "offset"):
                tensor = getattr(owner, attribute, None)
                if isinstance(tensor, torch.Tensor):
                    yield name, owner, attribute, tensor


def is_four_bit(layer: torch.nn.Module) -> bool:
    """Whether the layer is a bitsandbytes' `Linear4bit` that holds quantised weights."""
    return getattr(getattr(layer, "weight", None), "quant_state", None) is not None


def frozen_matrix(layer: torch.nn.Linear) -> torch.Tensor:
    """The weights (outputs, inputs) a linear layer computes with: its own, or dequantised for this call."""
    if isinstance(layer, Float8Linear):
        return layer.dequantized()
    if is_four_bit(layer):
        from bitsandbytes.functional import dequantize_4bit

        weight: Any = layer.weight
        return dequantize_4bit(weight.data, weight.quant_state)
    return layer.weight


def quantized_layers(model: PreTrainedModel) -> list[str]:
    """The dotted names of the layers that `model.quantization` stores in fewer bits."""
    chosen = {id(layer) for _, _, layer in _layers(model)}
    return [name for name, module in model.named_modules() if id(module) in chosen]


@torch.no_grad()
def quantization_round_trip(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The weights (outputs, inputs) that a layer with these computes with once it is quantised, in the same type.

    Args:
        kind: nf4 or fp8.
        weight: on the device of training: another one may round a tie otherwise.

    Raises:
        MachineError: nf4 without bitsandbytes.
    """
    if kind == "fp8":
        return Float8Linear(*to_float8(weight), None, weight.dtype).dequantized()
    _require_bitsandbytes()
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"))


class Float8Linear(torch.nn.Linear):
    """A frozen linear layer whose weights are float8 with a scale per output.

    W ≈ scale · Q, so that the largest weight of each row is 448, the largest float8: a weight is off by at most 2⁻⁴ of
    itself, or 2⁻¹⁰ · scale where it is below 2⁻⁶ · scale. On a GPU with float8 arithmetic (compute capability 8.9) and
    bfloat16 inputs whose sizes are multiples of 16, each input row is scaled to float8 as well and the product is
    taken in float8; elsewhere W is dequantised for the product. The gradient of the input always uses dequantised
    weights.

    Attributes:
        weight: (outputs, inputs) float8_e4m3fn.
        scale: (outputs, 1) float32.
        compute_dtype: what `dequantized` gives: the type the weights had.
        one_pass: whether float8 is made and read by our kernels (`kernels.use_kernels`), with the same numbers.
    """

    scale: torch.Tensor
    one_pass = False

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = compute_dtype
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_parameter(
            "bias", None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        )

    @classmethod
    @torch.no_grad()
    def of(cls, layer: torch.nn.Linear) -> Float8Linear:
        """The quantised form of a linear layer, on its device."""
        weight, scale = to_float8(layer.weight)
        return cls(weight, scale, layer.bias, layer.weight.dtype)

    def dequantized(self) -> torch.Tensor:
        """The weights, in `compute_dtype`, each rounded once."""
        made = float8_ops.dequantize_weights_fused if self.one_pass else float8_ops.dequantize_weights
        return made(self.weight, self.scale, self.compute_dtype)

    def rows_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`float8_ops.quantize_rows` of x (rows, inputs)."""
        return (float8_ops.quantize_rows_fused if self.one_pass else float8_ops.quantize_rows)(x)

    def product_of(self, rows: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b in float8, (rows, outputs) in `compute_dtype`, of x as `rows_of` gives it."""
        return torch._scaled_mm(rows, self.weight.T, row_scale, self.scale.T, self.bias, out_dtype=self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Float8Product.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float8Linear:
        """Moves to other devices, but not to other types: `.to(dtype)` would take Q for W and round the scale."""
        kept = {id(self.weight), id(self.scale)}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            fixed = id(tensor) in kept and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if fixed else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


class _Float8Product(torch.autograd.Function):
    """x Wᵀ + b, keeping nothing: W is dequantised again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Float8Linear) -> torch.Tensor:
        ctx.layer = layer
        if _multiplies_float8(x, layer):
            rows = layer.product_of(*layer.rows_of(x.reshape(-1, x.shape[-1])))
            return rows.view(*x.shape[:-1], layer.out_features)
        return torch.nn.functional.linear(x, layer.dequantized().to(x.dtype), layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return (dy @ ctx.layer.dequantized().to(dy.dtype) if ctx.needs_input_grad[0] else None), None


def to_float8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, scale) with tensor ≈ scale · Q: (rows, columns) float8_e4m3fn, and (rows, 1) float32."""
    values = tensor.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / FP8_MAX).clamp_(min=TINY)
    # Division rounds, so a row's largest value can come out above 448, where the conversion gives NaN.
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def linear_products(layers: Sequence[torch.nn.Linear], x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """What gives the output (rows, outputs) of each frozen layer for the same x (rows, inputs), outside autograd.

    Those that multiply in float8 share the rows, quantised once.
    """
    in_float8 = [layer for layer in layers if isinstance(layer, Float8Linear) and _multiplies_float8(x, layer)]
    rows = in_float8[0].rows_of(x) if in_float8 else ()
    return [partial(layer.product_of, *rows) if layer in in_float8 else partial(layer, x) for layer in layers]


def _multiplies_float8(x: torch.Tensor, layer: Float8Linear) -> bool:
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or layer.in_features % 16 or layer.out_features % 16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def _layers(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """The linear layers to quantise, as (parent, attribute, layer): all but the output head, what is tied to it, and
    what facts/all_linear.py leaves out. A class of a model's own may compute something else with its weight."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    shared = {id(model.get_input_embeddings().weight), id(getattr(head, "weight", None))}
    return [
        (parent, name, layer)
        for place, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear and layer is not head and id(layer.weight) not in shared
        if is_quantizable(f"{place}.{name}") and not _kept_precise(model, f"{place}.{name}")
    ]


def _kept_precise(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's class wants a layer of this dotted name in more bits than the others."""
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    return any(re.search(rf"(^|\.)(?:{each})($|\.)", name) for each in kept)


def _is_matrix(layer: torch.nn.Module) -> bool:
    """Whether transformers would quantise it."""
    return isinstance(layer, torch.nn.Linear | Conv1D)


def _four_bit_on_meta(layer: torch.nn.Linear) -> torch.nn.Module:
    import bitsandbytes

    library: Any = bitsandbytes  # only half of it is typed
    quant_state = library.functional.QuantState

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights = layer.weight.numel()
    scales = math.ceil(weights / BLOCK)
    dtype = layer.weight.dtype
    state = quant_state(
        absmax=empty(scales, dtype=torch.uint8),
        shape=layer.weight.shape,
        code=empty(16),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=empty(),
        state2=quant_state(empty(math.ceil(scales / BLOCKS)), code=empty(256), blocksize=BLOCKS, dtype=torch.float32),
    )
    made = library.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    packed = empty((weights + 1) // 2, 1, dtype=torch.uint8)
    made.weight = library.nn.Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=made)
    made.quant_state = state
    made.bias = layer.bias
    return made  # type: ignore[no-any-return]


def _require_bitsandbytes() -> None:
    try:
        importlib.import_module("accelerate")  # with which transformers places 4-bit weights
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise MachineError(
            f"4-bit weights need {error.name}, which is not installed",
            code="E5064",
            field=FIELD,
            help=f"{install_extra('quant')}; or set model.quantization: none",
        ) from error
