"""Frozen weights in fewer bits: NF4 through bitsandbytes, FP8 by a layer of our own.

NF4 (Dettmers et al. 2023, QLoRA): 4 bits per weight and a scale per 64 of them, the scales themselves in 8 bits: 4.127
bits per weight. FP8: 8 bits per weight (1 sign, 4 exponent, 3 mantissa) and a float32 scale per output. Embeddings and
the output head are not quantized, nor routers, layers for images or sound, and the adapter's factors.
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
"""Weights per NF4 scale, and scales per scale of the scales: bitsandbytes' defaults."""


def quantization_config(dtype: torch.dtype, model: PreTrainedModel) -> BitsAndBytesConfig:
    """Return the `quantization_config` of `from_pretrained` for NF4.

    Args:
        dtype: of everything that is not quantized, and of the arithmetic.
        model: the model to load, without its weights.

    Raises:
        MachineError: nf4 without bitsandbytes or accelerate.
    """
    _require_bitsandbytes()
    quantized = {id(layer) for _, _, layer in _layers(model)}
    skipped = [name for name, layer in model.named_modules() if _is_matrix(layer) and id(layer) not in quantized]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        # A pattern: a plain name would skip all modules that begin or end with it.
        llm_int8_skip_modules=[f"(?:{'|'.join(map(re.escape, skipped))})$"],
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=torch.uint8,
    )


def finish_loading(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Finish a model that transformers has loaded with `quantization_config`, in place.

    Args:
        kind: `model.quantization`. fp8: the model is quantized here, on its device.
    """
    if kind == "nf4":
        keep_four_bit_layout(model)
    if kind == "fp8":
        for parent, name, layer in _layers(model):
            setattr(parent, name, Float8Linear.of(layer))
    return model


def quantize_meta(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Give a model on the meta device the layers it would have after loading with this quantization, in place.

    Every tensor has the size and dtype it has on a real device. The tensors of NF4's quantization state are neither
    parameters nor buffers: `hidden_tensors` finds them. This also sets `model.is_loaded_in_4bit`, as loading does,
    because PEFT reads it.

    Args:
        model: on the meta device, without an adapter.
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
    """Yield the tensors of NF4's quantization states, which no module lists: (module's name, owner, attribute, tensor).

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
    """Return whether the layer is a bitsandbytes `Linear4bit` that holds quantized weights."""
    return getattr(getattr(layer, "weight", None), "quant_state", None) is not None


def frozen_matrix(layer: torch.nn.Linear) -> torch.Tensor:
    """Return the weights (outputs, inputs) a linear layer computes with: its own, or dequantized for this call."""
    if isinstance(layer, Float8Linear):
        return layer.dequantized()
    if is_four_bit(layer):
        from bitsandbytes.functional import dequantize_4bit

        weight: Any = layer.weight
        return dequantize_4bit(weight.data, weight.quant_state)
    return layer.weight


def quantized_layers(model: PreTrainedModel) -> list[str]:
    """Return the dotted names of the layers that `model.quantization` stores in fewer bits."""
    quantized = {id(layer) for _, _, layer in _layers(model)}
    return [name for name, module in model.named_modules() if id(module) in quantized]


@torch.no_grad()
def quantization_round_trip(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights (outputs, inputs) that a layer computes with after quantization, in the same dtype.

    Args:
        kind: nf4 or fp8.
        weight: on the device of training: another may round a tie differently.

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
    computed in float8; elsewhere W is dequantized for the product. The gradient of the input always uses dequantized
    weights.

    Attributes:
        weight: (outputs, inputs) float8_e4m3fn.
        scale: (outputs, 1) float32.
        compute_dtype: dtype of `dequantized`: the original weights' dtype.
        one_pass: whether our kernels convert to and from float8 (`kernels.use_kernels`), with the same numbers.
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
        """Return the quantized form of a linear layer, on its device."""
        weight, scale = to_float8(layer.weight)
        return cls(weight, scale, layer.bias, layer.weight.dtype)

    def dequantized(self) -> torch.Tensor:
        """Return the weights, in `compute_dtype`, each rounded once."""
        dequantize = float8_ops.dequantize_weights_fused if self.one_pass else float8_ops.dequantize_weights
        return dequantize(self.weight, self.scale, self.compute_dtype)

    def rows_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `float8_ops.quantize_rows` of x (rows, inputs)."""
        return (float8_ops.quantize_rows_fused if self.one_pass else float8_ops.quantize_rows)(x)

    def product_of(self, rows: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b computed in float8, (rows, outputs) in `compute_dtype`, for x from `rows_of`."""
        return torch._scaled_mm(rows, self.weight.T, row_scale, self.scale.T, self.bias, out_dtype=self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Float8Product.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float8Linear:
        """Move the layer to other devices, but not to other dtypes: `.to(dtype)` would take Q for W and round the
        scale."""
        kept = {id(self.weight), id(self.scale)}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            fixed = id(tensor) in kept and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if fixed else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


class _Float8Product(torch.autograd.Function):
    """x Wᵀ + b, saving nothing: W is dequantized again for the gradient of x."""

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
    """Return (Q, scale) with tensor ≈ scale · Q: (rows, columns) float8_e4m3fn, and (rows, 1) float32."""
    values = tensor.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / FP8_MAX).clamp_(min=TINY)
    # Division rounds, so a row's largest value can come out above 448, where the conversion gives NaN.
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def linear_products(layers: Sequence[torch.nn.Linear], x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """Return functions that compute the output (rows, outputs) of each frozen layer for the same x (rows, inputs),
    outside autograd.

    Layers that multiply in float8 share the rows, quantized once.
    """
    in_float8 = [layer for layer in layers if isinstance(layer, Float8Linear) and _multiplies_float8(x, layer)]
    rows = in_float8[0].rows_of(x) if in_float8 else ()
    return [partial(layer.product_of, *rows) if layer in in_float8 else partial(layer, x) for layer in layers]


def _multiplies_float8(x: torch.Tensor, layer: Float8Linear) -> bool:
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or layer.in_features % 16 or layer.out_features % 16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def _layers(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Return the linear layers to quantize, as (parent, attribute, layer): all but the output head, layers tied to it,
    and those that facts/all_linear.py leaves out. A class of a model's own may compute something else with its
    weight."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    shared = {id(model.get_input_embeddings().weight), id(getattr(head, "weight", None))}
    return [
        (parent, name, layer)
        for prefix, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear and layer is not head and id(layer.weight) not in shared
        if is_quantizable(f"{prefix}.{name}") and not _kept_precise(model, f"{prefix}.{name}")
    ]


def _kept_precise(model: PreTrainedModel, name: str) -> bool:
    """Return whether the model's class keeps a layer of this dotted name in more bits than the others."""
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    return any(re.search(rf"(^|\.)(?:{pattern})($|\.)", name) for pattern in kept)


def _is_matrix(layer: torch.nn.Module) -> bool:
    """Return whether transformers would quantize the layer."""
    return isinstance(layer, torch.nn.Linear | Conv1D)


def _four_bit_on_meta(layer: torch.nn.Linear) -> torch.nn.Module:
    import bitsandbytes

    library: Any = bitsandbytes  # only partly typed
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
    four_bit = library.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    packed = empty((weights + 1) // 2, 1, dtype=torch.uint8)
    four_bit.weight = library.nn.Params4bit(
        packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=four_bit
    )
    four_bit.quant_state = state
    four_bit.bias = layer.bias
    return four_bit  # type: ignore[no-any-return]


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
