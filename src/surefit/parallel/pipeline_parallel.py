"""Pipeline parallelism: every process holds some of the decoder's layers, and micro batches flow through them.

The schedule is torch's 1F1B (`torch.distributed.pipelining`). It moves tensors of one shape per step; so the hidden
states travel flat, (tokens, hidden size), filled up to the largest micro batch of the step, and are computed in their
own shapes: padded or packed, nothing is computed for the filling.

Every process reads the whole global batch. A stage runs the model's own forward pass, in which the layers of the other
stages hand on what they are given and the embeddings answer with what came from the stage before: masks, positions and
the loss are the single process's own code.
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
from surefit.parallel.engine import Batch, Engine, LossFunction, NormFunction
from surefit.parallel.gradients import sum_gradients
from surefit.parallel.process_group import World, all_reduce_sum, communication_device
from surefit.parallel.shard_ranges import LazyTensors

FIELD = "parallel.pp"


class Pipeline(Engine):
    """One stage of a pipeline per process, in the order of the ranks; several pipelines may share the rows of a step.

    Ranks 0 to `stages` − 1 are the first pipeline, and so on. Those of one read the same rows.

    Args:
        world: all processes, joined.
        stages: `parallel.pp`; divides the number of all.

    Attributes:
        stage: of this process, from 0.
        layers: the decoder layers of this stage, after `wrap`.
        elsewhere: the names of the parameters that other stages hold. Here they have their shape and no memory.

    Raises:
        ConfigError: it does not divide them.
    """

    name = "pp"

    def __init__(self, world: World, stages: int) -> None:
        super().__init__(world)
        if world.size % stages:
            raise ConfigError(
                f"{world.size} processes cannot be pipelines of {stages} stages",
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
        """The host: no device has to hold the whole model."""
        return "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Keep this stage's layers on the device and let go of the others; every process has loaded the whole model.

        Raises:
            ModelError: transformers has no pipeline plan for this model, or its forward pass is not the sum of its
                layers' (tried out on a few tokens).
            ConfigError: fewer layers than stages.
        """
        parts = _Parts(model)
        stages = split_layers(parts.costs(), self.stages)
        parts.require_exact(stages)
        self.layers = stages[self.stage]
        first, last = self.stage == 0, self.is_last
        parts.become(self.layers, first, last)
        tied = parts.tied_weight()
        away = parts.let_go(self.layers, first, last, communication_device(self.world))
        self.elsewhere = frozenset(name for name, p in model.named_parameters() if id(p) in away)
        if tied and parts.tied_weight_is_trained():
            self._ends = self._join_ends()
            self._tied = parts.embeddings.weight if first or last else None
        self._parts = parts
        self._require_shards(model)
        return model

    def _join_ends(self) -> dist.ProcessGroup | None:
        """The first and the last stage of this pipeline; every process makes those of all, as torch asks for it."""
        firsts = range(0, self.world.size, self.stages)
        ends: list[dist.ProcessGroup | None] = [dist.new_group([first, first + self.stages - 1]) for first in firsts]
        return ends[self.data_rank]

    def _require_shards(self, model: torch.nn.Module) -> None:
        """What this stage must hold, and no more."""
        parts = self._parts
        for index, layer in enumerate(parts.layers):
            held = [_has_memory(p) for p in layer.parameters()]
            assert all(held) if index in self.layers else not any(held), f"layer {index} on rank {self.world.rank}"
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
        # The same numbers on every stage would drop the same places in layers of different stages.
        torch.manual_seed(torch.initial_seed() + self.stage)
        device = communication_device(self.world)
        tokens = max(batch["input_ids"].numel() for batch in micro_batches)
        stage = _Stage(self._parts, model, micro_batches, loss_of, scale / supervised, tokens, self.is_last, device)
        schedule = self._schedule(stage, len(micro_batches), tokens)
        losses: list[torch.Tensor] = []
        # What the schedule cuts into micro batches is their numbers: each stage has them all.
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
        """1F1B over this step's micro batches. Where there are fewer of them than stages, torch refuses the name, and
        GPipe's order is the same."""
        travels = torch.empty(tokens, self._parts.width, dtype=self._parts.dtype, device="meta", requires_grad=True)
        piece = PipelineStage(
            stage,
            self.stage,
            self.stages,
            communication_device(self.world),
            input_args=() if self.stage == 0 else (travels,),
            output_args=torch.empty(1, device="meta", requires_grad=True) if self.is_last else travels,
            group=self.group,
        )
        kind = Schedule1F1B if count >= self.stages else ScheduleGPipe
        return kind(piece, count, loss_fn=_itself, scale_grads=False)

    def _exchange_tied(self) -> None:
        """The embedding and the head are one weight, held by the first and the last stage: both take the sum."""
        assert self._tied is not None
        if self._tied.grad is None:
            self._tied.grad = torch.zeros_like(self._tied)
        dist.all_reduce(self._tied.grad, group=self._ends)

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> float:
        """The summed loss, the same in every process of a pipeline."""
        device, rank = (
            communication_device(self.world),
            self.world.rank,
        )  # neighbours in the pipeline are neighbours among all
        tokens = batch["input_ids"].numel()
        stage = _Stage(self._parts, model, [batch], loss_of, 1.0, tokens, self.is_last, device)
        received: tuple[torch.Tensor, ...] = ()
        if self.stage > 0:
            hidden = torch.empty(tokens, self._parts.width, dtype=self._parts.dtype, device=device)
            dist.recv(hidden, rank - 1)
            received = (hidden,)
        output = stage(*received, number=torch.zeros(1, dtype=torch.int64))
        if not self.is_last:
            dist.send(output.contiguous(), rank + 1)
        return all_reduce_sum(float(output) if self.is_last else 0.0, self.world, self.group)

    def total(self, value: float) -> float:
        return all_reduce_sum(value, self.world, self.data_group) if self.data_size > 1 else value

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Only last stages have one."""
        dist.all_reduce(loss)
        return loss

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Over all stages; a weight that two of them hold counts once."""
        own = [p for p in parameters if not (self.is_last and p is self._tied)]
        square = norm(own).to(communication_device(self.world), torch.float64).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt().float()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rank 0 gets the tensors of every stage, those of others on the host; the others get nothing."""
        if self.data_rank > 0:  # the first pipeline has them all
            return {}
        own = {name: tensor.detach() for name, tensor in tensors.items() if not self._is_elsewhere(name)}
        described: list[Any] = [None] * self.stages
        dist.all_gather_object(described, {name: (t.shape, t.dtype) for name, t in own.items()}, group=self.group)
        found = dict(own) if self.world.is_first else {}
        known = set(described[0])
        for rank, entries in enumerate(described[1:], start=1):
            for name, (shape, dtype) in entries.items():
                if name in known:  # a tied weight, or what all stages share
                    continue
                known.add(name)
                if self.world.rank == rank:
                    dist.send(own[name].to(communication_device(self.world)).contiguous(), 0)
                elif self.world.is_first:
                    buffer = torch.empty(shape, dtype=dtype, device=communication_device(self.world))
                    dist.recv(buffer, rank)
                    found[name] = buffer.cpu()
        return found

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return LazyTensors([name for name in tensors if not self._is_elsewhere(name)], tensors.__getitem__)

    def _is_elsewhere(self, name: str) -> bool:
        """A parameter's name, or KEY.PARAMETER as the optimizer has it."""
        return name in self.elsewhere or name.partition(".")[2] in self.elsewhere


def _itself(loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The last stage's output is its loss already."""
    return loss.squeeze(0)


class _Stage(torch.nn.Module):
    """What the schedule calls: (hidden states of the stage before, number of the micro batch) → hidden states or loss.

    Args:
        factor: the loss is multiplied by it.
        tokens: rows of the hidden states as they travel.
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
            return (self.loss_of(self.model, batch) * self.factor).reshape(1)
        inputs = {name: _on(value, self.device) for name, value in batch.items() if name not in OWN_KEYS}
        with avoid_mask_syncs(batch):
            hidden = self.parts.decoder(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.requires_grad_()  # nothing is trained up to here; the schedule sends gradients all the same
        return torch.nn.functional.pad(hidden, (0, 0, 0, self.tokens - len(hidden)))


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


class _Parts:
    """The pieces of a causal language model, and which of them this process runs now.

    Attributes:
        received: what the embeddings answer with; None: they compute.

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
                help="set parallel.mode: fsdp, or ddp where the model fits one device",
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
        """Run these layers, with the embeddings and what comes after the layers, or without."""
        self._own, self._first, self._last = layers, first, last

    def _install(self) -> None:
        for index, layer in enumerate(self.layers):
            self._switch(layer, lambda index=index: index in self._own)
        for module in self.after:
            self._switch(module, lambda: self._last)

        def embed(forward: Any) -> Any:
            def answer(*args: Any, **kwargs: Any) -> Any:
                return forward(*args, **kwargs) if self._first else self.received

            return answer

        wrap_forward(self.embeddings, embed)

    def _switch(self, module: torch.nn.Module, runs: Any) -> None:
        def wrap(forward: Any) -> Any:
            def through(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return forward(hidden, *args, **kwargs) if runs() else hidden

            return through

        wrap_forward(module, wrap)

    def costs(self) -> list[int]:
        """What each layer weighs: its parameters; with the first those of the embeddings, with the last the head's."""
        found = [_size(layer) for layer in self.layers]
        found[0] += _size(self.embeddings)
        found[-1] += sum(_size(module) for module in (*self.after, self.head) if module is not None)
        return found

    def tied_weight(self) -> bool:
        """Whether the head's weight is the embedding."""
        return self.head is not None and self.head.weight is self.embeddings.weight

    def tied_weight_is_trained(self) -> bool:
        return bool(self.embeddings.weight.requires_grad)

    @torch.no_grad()
    def require_exact(self, stages: Sequence[range]) -> None:
        """Prove on a few tokens that the stages one after the other are the model, to the bit.

        Raises:
            ModelError: they are not.
        """
        was_training = self.model.training
        self.model.eval()
        device = self.embeddings.weight.device
        ids = torch.arange(2 * 8, device=device).view(2, 8) % self.causal_lm.config.get_text_config().vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        whole = self.decoder(**inputs).last_hidden_state
        try:
            for number, layers in enumerate(stages):
                self.become(layers, number == 0, number == len(stages) - 1)
                self.received = self.decoder(**inputs).last_hidden_state
            exact = self.received is not None and torch.equal(self.received, whole)
        except (RuntimeError, IndexError, TypeError, ValueError):
            exact = False
        self.received = None
        self.model.train(was_training)
        if not exact:
            raise ModelError(
                f"{type(self.causal_lm).__name__} computes something between its layers that a cut would change",
                code="E5085",
                field=FIELD,
                help="set parallel.mode: fsdp",
            )

    def let_go(self, layers: range, first: bool, last: bool, device: torch.device) -> set[int]:
        """Move what this stage runs to the device and free the rest; returns the ids of the freed parameters."""
        away = [layer for index, layer in enumerate(self.layers) if index not in layers]
        keeps_embeddings = first or (last and self.tied_weight())
        away += [] if keeps_embeddings else [self.embeddings]
        away += [] if last else self.after
        if self.head is not None and not last and not (first and self.tied_weight()):
            away.append(self.head)
        if not first:
            self.embeddings._forward_hooks.clear()  # NEFTune's noise belongs to the first stage
        freed = set()
        for part in away:
            freed |= _release_parameters(part, device)
        _move(self.model, freed, device)
        return freed


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _has_memory(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def _release_parameters(part: torch.nn.Module, device: torch.device) -> set[int]:
    """Put numbers without memory in the place of every parameter: of its shape and type, one value for all."""
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
        module.gradient_checkpointing = False  # type: ignore[assignment] # there is nothing to recompute
        module._compiled_call_impl = None
    return freed


def _move(module: torch.nn.Module, freed: set[int], device: torch.device) -> None:
    """`module.to(device)` for all but the freed parameters, which would get memory by it."""
    if not any(id(p) in freed for p in module.parameters()):
        module.to(device)
        return
    for child in module.children():
        _move(child, freed, device)
