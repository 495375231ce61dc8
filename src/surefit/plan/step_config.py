"""The settings that decide the memory and the time of a training step, taken from a resolved config and facts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import LoraSection, ObjectiveSection
from surefit.core.errors import ConfigError, ModelError
from surefit.facts.activations import AMPERE
from surefit.facts.gguf import read_gguf
from surefit.facts.gguf_model import config_of
from surefit.facts.hardware import HardwareFacts
from surefit.facts.hub import fetch
from surefit.facts.low_bits import dequantized_config
from surefit.facts.model import ModelFacts, catalogue, known_model, read_model_config
from surefit.facts.sharding import ShardingLayout, sharing_of
from surefit.facts.step_shape import micro_batch_shape
from surefit.plan.cpu import mapped_file_bytes, onednn_scratch_bytes, saves_before_last_step

FIELD = "model.name_or_path"
Checkpointing = bool | Literal["selective", "offload"]


@dataclass(frozen=True)
class StepConfig:
    """Settings that decide the memory of a training step.

    Attributes:
        config: the model's architecture.
        dtype: the dtype of the computation: "float32", "bfloat16" or "float16".
        adapter: the LoRA settings; None: all weights are trained.
        rows: examples per micro batch, two for each pair; length: tokens of the longest, to which all are padded.
            Packed examples are all of this length.
        padded: whether some rows are shorter, so that attention needs a mask.
        packed: whether the examples are concatenated in one row.
        micro_batches: micro batches per optimizer step. With more than one, the gradients are kept between them.
        checkpointing: `train.gradient_checkpointing`.
        chunked, fused_lora, kernels, tiled_mlp: as in the config's section `speed`.
        quantization: quantization of the frozen weights.
        optimizer: `train.optim`.
        neftune: `train.neftune_noise_alpha`.
        new_tokens: number of tokens at the end of the vocabulary whose rows are trained beside LoRA.
        supervised: the share of tokens that the loss counts.
        cuda: run the operators of a GPU; else the CPU's.
        attention: transformers' attn_implementation; None for its own choice, as in training.
        capability: the GPU's compute capability.
        saves_between: whether there is a step after the first checkpoint.
        evaluates: whether there are held-out rows, whose loss is measured.
        eval_shape: (rows, tokens of the longest, shared ones) of a micro batch of held-out rows; None: as in training.
        mapped: bytes of the weight files that stay in memory on a CPU beside the tensors made from them.
        products: bytes of scratch memory of matrix products on a CPU, beside their operands.
        sharing: the rank that is planned, and how the processes share the run; None for one process.
        objective: the objective of pairs or of labelled answers; None for the cross-entropy.
        shared: tokens of a pair's prompt that the second of its rows shares with the first, and that exist once.
    """

    config: PretrainedConfig
    dtype: str
    adapter: LoraSection | None
    rows: int
    length: int
    padded: bool = False
    micro_batches: int = 1
    checkpointing: Checkpointing = False
    packed: bool = False
    chunked: bool = True
    fused_lora: bool = False
    kernels: bool = False
    tiled_mlp: bool = False
    quantization: str = "none"
    optimizer: str = "adamw_torch"
    neftune: float | None = None
    new_tokens: int = 0
    supervised: float = 1.0
    cuda: bool = True
    attention: str | None = None
    capability: tuple[int, int] = AMPERE
    saves_between: bool = False
    evaluates: bool = True
    eval_shape: tuple[int, int, int] | None = None
    mapped: int = 0
    products: int = 0
    sharing: ShardingLayout | None = None
    objective: ObjectiveSection | None = None
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro batch, padding included."""
        return self.rows * self.length - self.rows // 2 * self.shared

    @property
    def targets(self) -> int:
        """Number of tokens of a micro batch that the loss counts; the first of an example has no prediction."""
        return max(1, math.ceil(self.supervised * self.rows * (self.length - max(1, self.shared))))

    @property
    def layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def uniform(self) -> bool:
        """Return whether all layers are of one kind."""
        kinds = getattr(self.config.get_text_config(), "layer_types", None)
        return kinds is None or len(set(kinds)) == 1

    @property
    def known(self) -> CacheKey:
        """Key of these settings for a cache."""
        without_config = replace(self, config=None)  # type: ignore[arg-type]
        return CacheKey(f"{type(self.config).__name__} {self.config.to_json_string()} {without_config!r}", self)

    def with_layers(self, layers: int) -> StepConfig:
        """Return the settings with only the first few layers."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        return replace(self, config=config)


@dataclass(frozen=True)
class CacheKey:
    """A setting identified by its text: a PretrainedConfig has no hash."""

    text: str
    setting: StepConfig = field(compare=False)


def build_step_config(
    resolved: ResolvedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    length: int | None = None,
    eval_length: int | None = None,
    padded: bool | None = None,
    supervised: float = 1.0,
) -> StepConfig:
    """Return the step settings of a run.

    Args:
        resolved: the config without "auto".
        model: facts about its base model; config.json is read again from their source.
        hardware: the device.
        length: tokens of the examples: the longest for memory, the mean for time; None: `data.max_length`.
        eval_length: tokens of the longest held-out example, where it is longer.
        padded: whether rows of a micro batch differ in length; None: wherever there is more than one.
        supervised: the share of tokens that the loss counts.

    Raises:
        ModelError: there is no config.json that transformers knows, or the weights are stored quantized.
        ConfigError: nothing can be trained with these numbers; see `require_sizes`.
    """
    config = resolved.config
    checkpointing, packed = config.train.gradient_checkpointing, config.data.packing
    assert checkpointing != "auto"
    assert packed != "auto"
    shape = micro_batch_shape(resolved, length)
    eval_shape = micro_batch_shape(resolved, eval_length) if eval_length else None
    setting = StepConfig(
        config=load_pretrained_config(model, config.model.revision),
        dtype=config.model.dtype,
        adapter=config.adapter,
        rows=shape.rows,
        length=shape.length,
        padded=not packed and (shape.rows > 1 if padded is None else padded),
        micro_batches=shape.micro_batches,
        checkpointing=checkpointing,
        packed=packed,
        chunked=config.speed.chunked_loss,
        fused_lora=config.speed.fused_lora is True,
        kernels=config.speed.kernels is True and hardware.kind == "cuda",
        tiled_mlp=config.speed.tiled_mlp is True,
        quantization=config.model.quantization,
        optimizer=config.train.optim,
        neftune=config.train.neftune_noise_alpha,
        new_tokens=model.new_tokens,
        supervised=supervised,
        cuda=hardware.kind == "cuda",
        # Every flash attention uses the same memory as torch's own.
        attention="eager" if config.speed.attention == "eager" else None,
        capability=hardware.compute_capability or AMPERE,
        saves_between=saves_before_last_step(resolved),
        evaluates=not config.data.holds_nothing_out,
        eval_shape=(eval_shape.rows, eval_shape.length, eval_shape.shared) if eval_shape else None,
        mapped=mapped_file_bytes(resolved, model) if hardware.kind == "cpu" else 0,
        products=onednn_scratch_bytes(resolved, model) if hardware.kind == "cpu" else 0,
        sharing=sharing_of(config),
        objective=config.objective if config.objective.name != "sft" else None,
        shared=shape.shared,
    )
    require_sizes(setting)
    return setting


def load_pretrained_config(model: ModelFacts, revision: str | None = None) -> PretrainedConfig:
    """Return the model's config.json as transformers reads it: from its folder, the packaged catalogue or the hub.

    Raises:
        ModelError: it needs code of its own, is stored quantized, or is of no type that this transformers knows.
        MachineError: it is only on the hub, and the hub cannot be reached.
    """
    if model.custom_code:
        raise ModelError(
            "comes with its own Python code",
            code="E8010",
            path=model.name,
            field=FIELD,
            help="models with custom code are not simulated",
        )
    if model.quantization:
        raise ModelError(
            f"its weights are stored quantized ({model.quantization})", code="E8011",
            path=model.name, field=FIELD, help="name the original, unquantized model",
        )  # fmt: skip
    values = dict(_with_floats(_config_json(model, revision)))
    kind = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"transformers cannot read its config.json: {' '.join(str(error).split())[:200]}", code="E8012",
            path=model.name, field=FIELD, help="a newer transformers may know this model_type",
        ) from error  # fmt: skip
    assert isinstance(config, PretrainedConfig)
    if model.new_tokens:
        config.get_text_config().vocab_size = model.vocab_size
    return config


def _with_floats(value: Any) -> Any:
    """Replace {"__float__": "Infinity"}, which transformers writes for infinity because JSON lacks it, with the
    number."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _config_json(model: ModelFacts, revision: str | None) -> Mapping[str, Any]:
    if model.path is not None:
        return dequantized_config(read_model_config(model.path))
    if model.gguf is not None:
        return config_of(read_gguf(model.gguf))
    entry = known_model(model.name)
    if entry is not None:
        config: Mapping[str, Any] = entry["config"]
        return config
    return fetch(model.name, revision, known=list(catalogue())).config


def require_sizes(setting: StepConfig) -> None:
    """Raise for numbers that no run can have.

    Raises:
        ConfigError: no rows, no tokens, no micro batch; a LoRA rank above the model's width.
        ModelError: a model without layers.
    """
    config = setting.config.get_text_config()
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    if not layers or layers < 1 or not width or width < 1:
        raise ModelError(
            f"a model of {layers} layers of width {width}",
            code="E8013",
            field=FIELD,
            help="correct num_hidden_layers and hidden_size",
        )
    for description, key, number in (
        ("rows in a micro batch", "train.per_device_train_batch_size", setting.rows),
        ("tokens in a row", "data.max_length", setting.length),
        ("micro batches in a step", "train.global_batch_size", setting.micro_batches),
    ):
        if number < 1:
            raise ConfigError(f"{number} {description}", code="E8014", field=key, help="at least 1")
    if setting.adapter is not None and setting.adapter.r > width:
        raise ConfigError(
            f"LoRA of rank {setting.adapter.r} has more parameters than the layers, which are {width} wide",
            code="E8015",
            field="lora.r", help=f"at most {width}; 8 to 64 is usual, and train.method: full trains everything",
        )  # fmt: skip
