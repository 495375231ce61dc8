"""Pipeline parallelism: every process holds some of the decoder's layers, and micro batches flow through them.

The schedule is torch's 1F1B (`torch.distributed.pipelining`). It sends tensors of one shape per step; so the hidden
states are sent flat, (tokens, hidden size), filled up to the largest micro batch of the step, and are computed in their
own shapes: padded or packed, nothing is computed for the filling.

Every process reads the whole global batch. A stage runs the model's own forward pass, in which the other stages' layers
return their input, and the embeddings return what arrived from the previous stage: masks, positions and the loss are
the single process's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from surefit.core.errors import ConfigError, ModelError
from surefit.data.tokens.collate import OWN_KEYS
from surefit.facts.sharding import split_layers
from surefit.model.compat import avoid_mask_syncs, wrap_forward
from surefit.model.prepare import unwrap_base_model
from surefit.parallel.engine import Batch, BatchFunction, Engine, LossFunction, NormFunction
from surefit.parallel.gradients import sum_gradients
from surefit.parallel.process_group import World, communication_device
from surefit.parallel.shard_ranges import LazyTensors

FIELD = "parallel.pp"


class Pipeline(Engine):
    """Engine with one pipeline stage per process, in the order of the ranks; several pipelines may share a step's rows.

    Ranks 0 to `stages` − 1 are the first pipeline, and so on. The processes of one pipeline read the same rows.

    Args:
        world: all processes, joined.
        stages: `parallel.pp`; divides the number of processes.

    Attributes:
        stage: this process's stage, from 0.
        layers: the decoder layers of this stage, after `wrap`.
        elsewhere: names of the parameters that other stages hold. In this process they have their shape and no memory.

    Raises:
        ConfigError: `stages` does not divide the number of processes.
    """

    name = "pp"

    def __init__(self, world: World, stages: int) -> None:
        super().__init__(world)
        if world.size % stages:
            raise ConfigError(
                f"{world.size} processes cannot form pipelines of {stages} stages",
                code="E5083",
                field=FIELD,
                help=f"set parallel.pp to {world.size}, or to a divisor of it",
            )
        self.data_rank, self.stage = divmod(world.rank, stages)
        self.stages, self.data_size = stages, world.size // stages
        self.is_last = self.stage == stages - 1
        groups = init_device_mesh(
            communication_device(world).type, (self.data_size, stages), mesh_dim_names=("data", "stages")
        )
        self.group, self.data_group = groups.get_group("stages"), groups.get_group("data")
        self.layers = range(0)
        self.elsewhere: frozenset[str] = frozenset()
        self._tied: torch.nn.Parameter | None = None
        self._ends: dist.ProcessGroup | None = None

    def loading_device(self, kind: str) -> str:
        """Return "cpu": no device has to hold the whole model."""
        return "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Keep this stage's layers on the device and free the others; every process has loaded the whole model.

        Raises:
            ModelError: transformers has no pipeline plan for this model, or its forward pass does more than its layers
                (tried on a few tokens).
            ConfigError: fewer layers than stages.
        """
        parts = _Parts(model)
        stages = split_layers(parts.costs(), self.stages)
        parts.require_exact(stages)
        self.layers = stages[self.stage]
        first, last = self.stage == 0, self.is_last
        parts.become(self.layers, first, last)
        tied = parts.tied_weight()
        freed_ids = parts.let_go(self.layers, first, last, communication_device(self.world))
        self.elsewhere = frozenset(name for name, p in model.named_parameters() if id(p) in freed_ids)
        if tied and parts.tied_weight_is_trained():
            self._ends = self._join_ends()
            self._tied = parts.embeddings.weight if first or last else None
        self._parts = parts
        self._require_shards(model)
        return model

    def _join_ends(self) -> dist.ProcessGroup | None:
        """Return the group of this pipeline's first and last stage; every process creates all such groups, as torch
        requires.
        """
        first_ranks = range(0, self.world.size, self.stages)
        end_groups: list[dist.ProcessGroup | None] = [
            dist.new_group([first, first + self.stages - 1]) for first in first_ranks
        ]
        return end_groups[self.data_rank]

    def _require_shards(self, model: torch.nn.Module) -> None:
        """Assert that this stage holds its own layers, and no others."""
        parts = self._parts
        for index, layer in enumerate(parts.layers):
            in_memory = [_has_memory(p) for p in layer.parameters()]
            assert all(in_memory) if index in self.layers else not any(in_memory), (
                f"layer {index} on rank {self.world.rank}"
            )
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert not trained & self.elsewhere

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        # Equal seeds on every stage would drop the same positions in layers of different stages.
        torch.manual_seed(torch.initial_seed() + self.stage)
        device = communication_device(self.world)
        tokens = max(batch["input_ids"].numel() for batch in micro_batches)
        stage = _Stage(self._parts, model, micro_batches, loss_of, scale / supervised, tokens, self.is_last, device)
        schedule = self._schedule(stage, len(micro_batches), tokens)
        losses: list[torch.Tensor] = []
        # The schedule splits indices into micro batches: each stage has all micro batches.
        numbers = torch.arange(len(micro_batches))
        target = {"target": numbers, "losses": losses} if self.is_last else {}
        schedule.step(number=numbers, return_outputs=False, **target)
        if self._tied is not None:
            self._exchange_tied()
        if self.data_size > 1:
            sum_gradients([parameter for parameter in model.parameters() if parameter.requires_grad], self.data_group)
        total = torch.zeros((), device=device)
        return total + torch.stack(losses).sum().detach() / scale if losses else total

    def _schedule(self, stage: torch.nn.Module, count: int, tokens: int) -> Any:
        """Build the 1F1B schedule for this step's micro batches. With fewer of them than stages, torch does not allow
        1F1B, and GPipe's order is the same.
        """
        hidden = torch.empty(tokens, self._parts.width, dtype=self._parts.dtype, device="meta", requires_grad=True)
        pipeline_stage = PipelineStage(
            stage,
            self.stage,
            self.stages,
            communication_device(self.world),
            input_args=() if self.stage == 0 else (hidden,),
            output_args=torch.empty(1, device="meta", requires_grad=True) if self.is_last else hidden,
            group=self.group,
        )
        kind = Schedule1F1B if count >= self.stages else ScheduleGPipe
        return kind(pipeline_stage, count, loss_fn=_itself, scale_grads=False)

    def _exchange_tied(self) -> None:
        """Sum the gradients of the tied weight, which the first stage (embedding) and the last stage (head) both
        hold.
        """
        assert self._tied is not None
        if self._tied.grad is None:
            self._tied.grad = torch.zeros_like(self._tied)
        dist.all_reduce(self._tied.grad, group=self._ends)

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, batch: Batch, function: BatchFunction, size: int) -> torch.Tensor:
        """Return what the function computes on the last stage, in every process of the pipeline."""
        # Neighbors in the pipeline are neighbors among all.
        device, rank = communication_device(self.world), self.world.rank
        tokens = batch["input_ids"].numel()
        stage = _Stage(self._parts, model, [batch], function, 1.0, tokens, self.is_last, device)
        received: tuple[torch.Tensor, ...] = ()
        if self.stage > 0:
            hidden = torch.empty(tokens, self._parts.width, dtype=self._parts.dtype, device=device)
            dist.recv(hidden, rank - 1)
            received = (hidden,)
        output = stage(*received, number=torch.zeros(1, dtype=torch.int64))
        if not self.is_last:
            dist.send(output.contiguous(), rank + 1)
        values = output.double() if self.is_last else torch.zeros(size, dtype=torch.float64, device=device)
        if size:
            dist.all_reduce(values, group=self.group)
        return values

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Sum the loss over all processes; only last stages have one."""
        dist.all_reduce(loss)
        return loss

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Return the norm over all stages; a weight that two of them hold counts once."""
        stage_parameters = [p for p in parameters if not (self.is_last and p is self._tied)]
        square = norm(stage_parameters).to(communication_device(self.world), torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().float()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather the tensors of every stage on rank 0, other stages' on the host; other ranks return nothing."""
        if self.data_rank > 0:  # the first pipeline has them all
            return {}
        stage_tensors = {name: tensor.detach() for name, tensor in tensors.items() if not self._is_elsewhere(name)}
        descriptions: list[Any] = [None] * self.stages
        dist.all_gather_object(
            descriptions, {name: (t.shape, t.dtype) for name, t in stage_tensors.items()}, group=self.group
        )
        gathered = dict(stage_tensors) if self.world.is_first else {}
        gathered_names = set(descriptions[0])
        for rank, entries in enumerate(descriptions[1:], start=1):
            for name, (shape, dtype) in entries.items():
                if name in gathered_names:  # a tied weight, or a tensor that all stages share
                    continue
                gathered_names.add(name)
                if self.world.rank == rank:
                    dist.send(stage_tensors[name].to(communication_device(self.world)).contiguous(), 0)
                elif self.world.is_first:
                    buffer = torch.empty(shape, dtype=dtype, device=communication_device(self.world))
                    dist.recv(buffer, rank)
                    gathered[name] = buffer.cpu()
        return gathered

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return LazyTensors([name for name in tensors if not self._is_elsewhere(name)], tensors.__getitem__)

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a parameter is on another stage; the name is a parameter's, or KEY.PARAMETER as in the
        optimizer.
        """
        return name in self.elsewhere or name.partition(".")[2] in self.elsewhere


def _itself(loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage has already computed."""
    return loss.squeeze(0)


class _Stage(torch.nn.Module):
    """Module that the schedule calls: (hidden states of the previous stage, micro batch index) → hidden states or loss.

    Args:
        factor: factor of the loss.
        tokens: number of rows of the hidden states when they are sent.
    """

    def __init__(
        self,
        parts: _Parts,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        factor: float,
        tokens: int,
        is_last: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts, self.micro_batches, self.loss_of = parts, micro_batches, loss_of
        self.factor, self.tokens, self.is_last, self.device = factor, tokens, is_last, device
        self.model = model

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        batch = self.micro_batches[int(number)]
        rows, length = batch["input_ids"].shape
        if received:
            self.parts.received = received[0][: rows * length].view(rows, length, -1)
        if self.is_last:
            return (self.loss_of(self.model, batch) * self.factor).flatten()
        inputs = {name: _on(value, self.device) for name, value in batch.items() if name not in OWN_KEYS}
        with avoid_mask_syncs(batch):
            hidden = self.parts.decoder(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = (
                hidden.requires_grad_()
            )  # nothing is trained up to this stage; the schedule sends gradients all the same
        return torch.nn.functional.pad(hidden, (0, 0, 0, self.tokens - len(hidden)))


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


class _Parts:
    """The modules of a causal language model, and which of them this process currently runs.

    Attributes:
        received: hidden states that the embeddings return; None: they compute.

    Raises:
        ModelError: transformers has no pipeline plan for the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.causal_lm = cast(Any, unwrap_base_model(model))
        kind = type(self.causal_lm).__name__
        plan = getattr(self.causal_lm.config.get_text_config(), "base_model_pp_plan", None) or {}
        self.decoder: Any = self.causal_lm.get_decoder()
        names = list(plan)
        if "layers" not in names or any(not hasattr(self.decoder, name) for name in names):
            raise ModelError(
                f"transformers has no pipeline plan for {kind}",
                code="E5084",
                field=FIELD,
                help="set parallel.mode: fsdp, or ddp if the model fits one device",
            )
        self.layers: torch.nn.ModuleList = self.decoder.layers
        self.embeddings: Any = self.causal_lm.get_input_embeddings()
        self.head: Any = self.causal_lm.get_output_embeddings()
        self.after = [getattr(self.decoder, name) for name in names[names.index("layers") + 1 :]]
        self.width = int(self.causal_lm.config.get_text_config().hidden_size)
        self.dtype: torch.dtype = self.causal_lm.dtype
        self.received: torch.Tensor | None = None
        self.become(range(len(self.layers)), True, True)
        self._install()

    def become(self, layers: range, first: bool, last: bool) -> None:
        """Select the layers to run, and whether to run the embeddings and the modules after the layers."""
        self._own, self._first, self._last = layers, first, last

    def _install(self) -> None:
        for index, layer in enumerate(self.layers):
            self._switch(layer, lambda index=index: index in self._own)
        for module in self.after:
            self._switch(module, lambda: self._last)

        def embed(forward: Any) -> Any:
            def embed_or_receive(*args: Any, **kwargs: Any) -> Any:
                return forward(*args, **kwargs) if self._first else self.received

            return embed_or_receive

        wrap_forward(self.embeddings, embed)

    def _switch(self, module: torch.nn.Module, runs: Any) -> None:
        def wrap(forward: Any) -> Any:
            def run_or_skip(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return forward(hidden, *args, **kwargs) if runs() else hidden

            return run_or_skip

        wrap_forward(module, wrap)

    def costs(self) -> list[int]:
        """Return each layer's cost in parameters; the first includes the embeddings, the last the head."""
        sizes = [_size(layer) for layer in self.layers]
        sizes[0] += _size(self.embeddings)
        sizes[-1] += sum(_size(module) for module in (*self.after, self.head) if module is not None)
        return sizes

    def tied_weight(self) -> bool:
        """Return whether the head's weight is the embedding."""
        return self.head is not None and self.head.weight is self.embeddings.weight

    def tied_weight_is_trained(self) -> bool:
        return bool(self.embeddings.weight.requires_grad)

    @torch.no_grad()
    def require_exact(self, stages: Sequence[range]) -> None:
        """Check on a few tokens that the stages in sequence equal the model exactly.

        Raises:
            ModelError: they are not.
        """
        was_training = self.model.training
        self.model.eval()
        device = self.embeddings.weight.device
        ids = torch.arange(2 * 8, device=device).view(2, 8) % self.causal_lm.config.get_text_config().vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        expected = self.decoder(**inputs).last_hidden_state
        try:
            for number, layers in enumerate(stages):
                self.become(layers, number == 0, number == len(stages) - 1)
                self.received = self.decoder(**inputs).last_hidden_state
            exact = self.received is not None and torch.equal(self.received, expected)
        except (RuntimeError, IndexError, TypeError, ValueError):
            exact = False
        self.received = None
        self.model.train(was_training)
        if not exact:
            raise ModelError(
                f"{type(self.causal_lm).__name__} gives another result when it is split into stages",
                code="E5085",
                field=FIELD,
                help="set parallel.mode: fsdp",
            )

    def let_go(self, layers: range, first: bool, last: bool, device: torch.device) -> set[int]:
        """Move this stage's modules to the device and free the others; return the ids of the freed parameters."""
        unused_modules = [layer for index, layer in enumerate(self.layers) if index not in layers]
        keeps_embeddings = first or (last and self.tied_weight())
        unused_modules += [] if keeps_embeddings else [self.embeddings]
        unused_modules += [] if last else self.after
        if self.head is not None and not last and not (first and self.tied_weight()):
            unused_modules.append(self.head)
        if not first:
            self.embeddings._forward_hooks.clear()  # NEFTune's noise belongs to the first stage
        freed = set()
        for part in unused_modules:
            freed |= _release_parameters(part, device)
        _move(self.model, freed, device)
        return freed


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _has_memory(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def _release_parameters(part: torch.nn.Module, device: torch.device) -> set[int]:
    """Replace every parameter by a tensor without memory: of its shape and type, one value expanded."""
    freed = set()
    for module in part.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            empty = torch.zeros((), dtype=old.dtype, device=device).expand(old.shape)
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
            freed.add(id(module._parameters[name]))
        if getattr(module, "quant_state", None) is not None:
            module.quant_state = None  # type: ignore[assignment]
        module.gradient_checkpointing = False  # type: ignore[assignment]  # there is nothing to recompute
        module._compiled_call_impl = None
    return freed


def _move(module: torch.nn.Module, freed: set[int], device: torch.device) -> None:
    """Move all but the freed parameters to the device, because moving would give those memory."""
    if not any(id(p) in freed for p in module.parameters()):
        module.to(device)
        return
    for child in module.children():
        _move(child, freed, device)
