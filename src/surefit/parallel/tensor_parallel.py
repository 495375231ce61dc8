"""Tensor parallelism: every process holds a slice of each large matrix, according to the model's own plan.

For every model family transformers' `tp_plan` states which linear layers are sliced by their outputs (colwise), which
by their inputs (rowwise), and where results are gathered. torch's `torch.distributed.tensor.parallel` carries it out.
It is applied to the loaded model with its adapter: LoRA factors are sliced with their layer, B by its outputs in a
colwise layer, A by its inputs in a rowwise one; the other factor is replicated.

Everything that is trained is a `DTensor`, replicated tensors too: an optimizer accepts no mixture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import LoraLayer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from surefit.core.errors import ConfigError, ModelError
from surefit.model.prepare import unwrap_base_model
from surefit.parallel.engine import Batch, Engine, LossFunction, NormFunction
from surefit.parallel.gradients import sum_gradients
from surefit.parallel.process_group import World, communication_device, sum_over_processes
from surefit.parallel.shard_ranges import LazyTensors

FIELD = "parallel.tp"
OTHER_MODES = "set parallel.mode: fsdp, or pp"

_BY_OUTPUTS = partial(ColwiseParallel, use_local_output=False)
_BY_INPUTS = partial(RowwiseParallel, output_layouts=Partial(), use_local_output=False)
CUT: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": _BY_OUTPUTS,
    "colwise_gather_output": _BY_OUTPUTS,
    "rowwise": _BY_INPUTS,
    "rowwise_rep": _BY_INPUTS,
    "rowwise_split_input": partial(_BY_INPUTS, input_layouts=Replicate()),
}
"""transformers' names of styles → torch's; the outputs of all but the first are gathered by a hook of ours."""
ON_SLICES = "replicated_with_grad_allreduce"
"""Norm of query or key heads: replicated, but each process applies it to its own heads."""
WHOLE = frozenset({"embedding_rowwise", "embedding_colwise", "replicate", "sequence_parallel"})
"""Styles that save memory by slicing; SureFit replicates these modules, which is exact."""
HEADS = ("k_proj", "qkv_proj", "query_key_value")
"""Layers whose outputs are heads, which cannot be split."""


class TensorParallel(Engine):
    """Engine whose processes share every matrix and read the same rows; groups of them may share a step's rows.

    Ranks 0 to `size` − 1 are the first group, and so on: processes of a group communicate most, and should be on one
    machine.

    Args:
        world: all processes, joined.
        size: `parallel.tp`; divides the number of processes.

    Attributes:
        mesh: this process's group, one dimension.

    Raises:
        ConfigError: `size` does not divide the number of processes.
    """

    name = "tp"

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)
        if world.size % size:
            raise ConfigError(
                f"{world.size} processes cannot be divided into groups of {size}",
                code="E5086",
                field=FIELD,
                help=f"set parallel.tp to {world.size}, or to a divisor of it",
            )
        self.data_rank, group_rank = divmod(world.rank, size)
        self.data_size, self.counts_whole = world.size // size, group_rank == 0
        groups = init_device_mesh(
            communication_device(world).type, (self.data_size, size), mesh_dim_names=("data", "tp")
        )
        self.size, self.mesh, self.data_group = size, groups["tp"], groups.get_group("data")

    def loading_device(self, kind: str) -> str:
        """Return "cpu": no device has to hold the whole model."""
        return "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Slice the model; every process has loaded it whole.

        Raises:
            ModelError: transformers has no plan for it, the plan has an unsupported style, layers are quantized, or
                heads do not divide; or the sliced model computes something else (tried on a few tokens).
        """
        causal_lm = cast(Any, unwrap_base_model(model))
        expected = _hidden(causal_lm)
        parts = list(_layers_to_shard(causal_lm, self.size))
        for part in parts:
            self._cut(part)
        self._share_trained(causal_lm, {id(part.module) for part in parts if part.style == ON_SLICES})
        model.to(communication_device(self.world))
        for part in parts:
            _require_cut(part, self.size)
        assert all(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
        _require_same(causal_lm, expected, _hidden(causal_lm))
        return model

    def _cut(self, part: _Part) -> None:
        if part.style == ON_SLICES:
            return
        for module in part.cut:
            # Scattered by rank 0: a slice of the local matrix would keep all of it in memory.
            parallelize_module(module, self.mesh, CUT[part.style]())
            if part.style != "colwise":
                module.register_forward_hook(_gather_full_output)
        for module in part.whole:
            _share(module, self.mesh, Replicate())

    def _share_trained(self, causal_lm: Any, on_slices: set[int]) -> None:
        """Convert trained parameters that are not sliced to replicated `DTensor`s."""
        embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        tied = head is not None and head.weight is embeddings.weight
        for name, module in causal_lm.named_modules():
            plain = [p for p in module._parameters.values() if p is not None and not isinstance(p, DTensor)]
            if not any(p.requires_grad for p in plain):
                continue
            if any(True for _ in module.children()):
                raise ModelError(f"{name} has parameters of its own", code="E5087", field=FIELD, help=OTHER_MODES)
            # A process's own heads count as its own rows: the gradients of all of them are summed.
            _share(module, self.mesh, Shard(0) if id(module) in on_slices else Replicate())
            if tied and module is embeddings:
                head.weight = embeddings.weight
                _share(head, self.mesh, Replicate())

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        total = super().run(model, micro_batches, loss_of, supervised, scale)
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            if gradient is not None and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if self.data_size > 1:
            sum_gradients([parameter for parameter in model.parameters() if parameter.requires_grad], self.data_group)
        return total

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return sum_over_processes(loss, self.data_group) if self.data_size > 1 else loss

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Return the gradient norm: sliced parameters are summed over the processes, replicated ones count once."""
        sliced: list[Any] = []
        replicated: list[Any] = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradient: Any = parameter.grad
                (sliced if gradient.placements[0].is_shard() else replicated).append(_Gradient(gradient.to_local()))
        square = norm(sliced).double().square().to(communication_device(self.world))
        if self.counts_whole:
            square += norm(replicated).double().square().to(square.device)
        dist.all_reduce(square, group=self.mesh.get_group())
        return square.sqrt().float()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather the tensors on rank 0, on the host; other ranks return nothing."""
        gathered: dict[str, torch.Tensor] = {}
        if self.data_rank > 0:  # the first group has them all
            return gathered
        names: dict[int, str] = {}
        for name, tensor in tensors.items():
            if id(tensor) in names:  # a head tied to the embedding stays tied
                if self.world.is_first:
                    gathered[name] = gathered[names[id(tensor)]]
                continue
            names[id(tensor)] = name
            full = tensor.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            if self.world.is_first:
                gathered[name] = full.cpu()
        return gathered

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Map names to this process's slices; `tensors` may have the optimizer's KEY.PARAMETER for the parameters in
        `like`.
        """
        return LazyTensors(tensors, lambda name: self._share_of(tensors[name], _parameter_for_name(name, like)))

    def _share_of(self, tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(like, DTensor) or like.shape != tensor.shape:
            return tensor
        return distribute_tensor(tensor, self.mesh, like.placements, src_data_rank=None)


@dataclass
class _Gradient:
    """Stand-in for a parameter in `gradient_norm`: this process's slice of the gradient."""

    grad: torch.Tensor


@dataclass(frozen=True)
class _Part:
    """A module that the plan names.

    Attributes:
        module: the module in the model, with its LoRA factors.
        cut: the linear layers that are sliced.
        whole: trained linear layers beside them that are replicated.
    """

    name: str
    style: str
    module: torch.nn.Module
    cut: list[Any]
    whole: list[Any]

    @property
    def dimension(self) -> int:
        """Dimension of the weights that is sliced."""
        return 0 if self.style.startswith("colwise") else 1


def _layers_to_shard(causal_lm: Any, size: int) -> Iterator[_Part]:
    """Yield the modules that the model's plan names, each with its slicing."""
    kind = type(causal_lm).__name__
    plan: dict[str, str] = dict(getattr(causal_lm, "tp_plan", None) or {})
    if not any(style in CUT and not name.startswith("lm_head") for name, style in plan.items()):
        raise ModelError(
            f"transformers has no tensor-parallel plan for {kind}", code="E5088", field=FIELD, help=OTHER_MODES
        )
    _require_whole_heads(causal_lm, plan, size)
    head = causal_lm.get_output_embeddings()
    tied = head is not None and head.weight is causal_lm.get_input_embeddings().weight
    for name, module in causal_lm.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        # A head tied to the embedding is replicated with it.
        if style is None or style in WHOLE or (tied and module is head):
            continue
        yield _part(name, style, module, size)


def _part(name: str, style: str, module: torch.nn.Module, size: int) -> _Part:
    if style == ON_SLICES:
        return _Part(name, style, module, [], [])
    if style not in CUT:
        raise ModelError(
            f"transformers' plan for {name} is {style}, which SureFit does not support",
            code="E5089",
            field=FIELD,
            help=OTHER_MODES,
        )
    base: Any = module.base_layer if isinstance(module, LoraLayer) else module
    if type(base) is not torch.nn.Linear:
        raise ModelError(
            f"{name} is a {type(base).__name__}: the blocks of quantized weights cross the edges of slices",
            code="E5090",
            field="model.quantization",
            help="set model.quantization: none, or parallel.mode: ddp or pp",
        )
    width = base.out_features if style.startswith("colwise") else base.in_features
    if width % size:
        raise ModelError(
            f"{name} has {width} {'outputs' if style.startswith('colwise') else 'inputs'}, not divisible by "
            f"{size} processes",
            code="E5091",
            field=FIELD,
            help="choose a number of processes that divides them",
        )
    if not isinstance(module, LoraLayer):
        return _Part(name, style, module, [base], [])
    a, b = (list(factors.values()) for factors in (module.lora_A, module.lora_B))
    sliced, replicated = (b, a) if style.startswith("colwise") else (a, b)
    return _Part(name, style, module, [base, *sliced], replicated)


def _require_whole_heads(causal_lm: Any, plan: Mapping[str, str], size: int) -> None:
    if not any(name.endswith(HEADS) and style == "colwise" for name, style in plan.items()):
        return
    config = causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    for kind, count in (("attention heads", heads), ("key heads", getattr(config, "num_key_value_heads", heads))):
        if count is not None and count % size:
            raise ModelError(
                f"the model has {count} {kind}, not divisible by {size} processes",
                code="E5092",
                field=FIELD,
                help=f"choose a number of processes that divides {count}, or {OTHER_MODES.removeprefix('set ')}",
            )


def _gather_full_output(module: torch.nn.Module, inputs: Any, output: Any) -> torch.Tensor:
    """Gather the output at once, not at its first use, as torch's styles would: an output without a use would wait, and
    be kept, forever. The chunked loss only looks at the shape of some logits, and the end of a recomputed layer is
    never read.
    """
    full: torch.Tensor = output.full_tensor()
    return full


def _share(module: torch.nn.Module, mesh: DeviceMesh, input_placement: Replicate | Shard) -> None:
    """Make a module's parameters whole `DTensor`s; its inputs and outputs stay plain tensors."""

    def enter(module: torch.nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(value, mesh, [input_placement], run_check=False)
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        )

    def leave(module: torch.nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, input_fn=enter, output_fn=leave)  # type: ignore[arg-type]


def _require_cut(part: _Part, size: int) -> None:
    """Assert that each slice has the right size, and memory of its own."""
    for module in part.cut:
        weight: Any = module.weight
        assert isinstance(weight, DTensor), part.name
        assert weight.placements == (Shard(part.dimension),), part.name
        local, full_shape = weight.to_local(), weight.shape
        assert local.shape[part.dimension] * size == full_shape[part.dimension], part.name
        assert local.untyped_storage().nbytes() == local.nbytes, part.name


@torch.no_grad()
def _hidden(causal_lm: Any) -> torch.Tensor:
    """Return the decoder's hidden states for a few tokens."""
    was_training = causal_lm.training
    causal_lm.eval()
    device = causal_lm.get_input_embeddings().weight.device
    ids = torch.arange(2 * 8, device=device).view(2, 8) % causal_lm.config.get_text_config().vocab_size
    decoder = causal_lm.get_decoder()
    hidden: torch.Tensor = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    causal_lm.train(was_training)
    return hidden.float()


def _require_same(causal_lm: Any, whole: torch.Tensor, cut: torch.Tensor) -> None:
    """Raise if slicing changed the hidden states: slices sum in another order, so the last bits differ; wrong slicing
    gives something else altogether.
    """
    tolerance = 1e-3 if causal_lm.dtype == torch.float32 else 0.1
    difference = float((cut.to(whole.device) - whole).norm() / whole.norm())
    if not difference < tolerance:
        raise ModelError(
            f"{type(causal_lm).__name__} gives another result under transformers' tensor-parallel plan: its "
            f"hidden states differ by {difference:.2g} of their size",
            code="E5093",
            field=FIELD,
            help=OTHER_MODES,
        )


def _parameter_for_name(name: str, like: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    tensor = like.get(name)
    return like.get(name.partition(".")[2]) if tensor is None else tensor
