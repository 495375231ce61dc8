"""ZeRO (Rajbhandari et al. 2020) through DeepSpeed: sharded optimizer state, gradients and, in stage 3, weights.

DeepSpeed shards, gathers and communicates. The definition of a step stays ours: the loss is divided by the supervised
tokens of all processes, the norm is computed and checked before anything is updated, and the update is the same torch
AdamW as in a single process, on float32 masters. So a checkpoint has the format of a single process, and any mode
resumes it.

Three things are DeepSpeed's: it reduces gradients after every micro batch, not once per step; gradients of bfloat16
models are reduced in bfloat16; and a trained parameter that no loss reaches gets a gradient of zeros, so that its
moments and weight decay are updated, where a single process would skip it.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from surefit.config.modes import MODES, ZERO
from surefit.config.schema import ParallelSection
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.packaging import install_extra
from surefit.core.reading import read_json_file
from surefit.importers.adopt import TUNING
from surefit.parallel.engine import Batch, BatchFunction, Engine, LossFunction, NormFunction
from surefit.parallel.process_group import World, communication_device, sum_over_processes

CLASSES = {2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
"""Stage → name of DeepSpeed's optimizer class for it. It depends on the data types too."""
PRECISION: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {},
    torch.bfloat16: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    torch.float16: {"fp16": {"enabled": True, "loss_scale": 1.0}, "data_types": {"grad_accum_dtype": "fp32"}},
}
"""The loss scale of float16 is ours (train/scaling.py): DeepSpeed's is switched off."""


class Zero(Engine):
    """Engine for the ZeRO stage of the parallel mode.

    The model is trained in place: it keeps its class and names, and its modules have DeepSpeed's hooks. It is sharded
    when the optimizer is made.

    Raises:
        MachineError: DeepSpeed cannot be imported.
    """

    def __init__(self, world: World, section: ParallelSection) -> None:
        super().__init__(world)
        self.name: str = section.mode
        self.stage = MODES[self.name].zero_stage
        self.data_rank, self.data_size = world.rank, world.size
        self.gradient_factor = float(world.size)  # DeepSpeed averages over processes
        self._section = section
        self._deepspeed = import_deepspeed(world)
        self._optimizer: ZeroOptimizer | None = None

    def optimizer(self, model: torch.nn.Module, make: Callable[..., Any]) -> ZeroOptimizer:
        """Shard `model` and the state of its AdamW; a second call for the same model resets the optimizer."""
        if self._optimizer is not None:
            assert self._optimizer.model is model, "one engine trains one model"
            self._optimizer.forget()
            return self._optimizer
        if not dist.is_initialized():  # DeepSpeed needs a process group for one process, too
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        (inner,) = make(model, masters=False).inner
        config = build_deepspeed_config(self._section, next(iter(trained.values())).dtype)
        runtime = self._deepspeed.initialize(
            model=_WithLoss(model), optimizer=inner, config=config, dist_init_required=False
        )[0]
        class_name, expected_name = type(runtime.optimizer).__name__, CLASSES[self.stage]
        assert class_name == expected_name, f"DeepSpeed made a {class_name}, not a {expected_name}"
        self._optimizer = ZeroOptimizer(model, trained, inner, runtime, self.stage)
        self._require_shares(trained)
        return self._optimizer

    def _require_shares(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Assert that DeepSpeed has sharded as configured: each process holds its part, and no more, of every sharded
        tensor.
        """
        assert self._optimizer is not None
        size = self.world.size
        if self.stage == 3:
            for parameter in self._optimizer.model.parameters():
                local, total = parameter.ds_tensor.numel(), parameter.ds_numel  # type: ignore[attr-defined]
                assert local == -(-total // size), f"{local} of {total} numbers are here, of {size} processes"
            return
        numbers = sum(parameter.numel() for parameter in trained.values())
        local = sum(part.numel() for part in self._optimizer.parts)
        # A group is padded to a multiple of twice the processes.
        assert numbers <= local * size < numbers + 2 * size * len(self._optimizer.parts) + 1

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        assert self._optimizer is not None
        runtime = self._optimizer.runtime
        total = torch.zeros((), device=communication_device(self.world))
        for number, batch in enumerate(micro_batches, start=1):
            runtime.set_gradient_accumulation_boundary(number == len(micro_batches))
            part = runtime(loss_of, batch) / supervised
            runtime.backward(part * (scale * self.gradient_factor), scale_wrt_gas=False)
            total += part.detach()
        self._optimizer.pending = True
        return total

    def evaluate(self, model: torch.nn.Module, batch: Batch, function: BatchFunction, size: int) -> torch.Tensor:
        assert self._optimizer is not None
        values: torch.Tensor = self._optimizer.runtime.module(function, batch)
        return values.flatten()

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return sum_over_processes(loss)

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Return the norm of the gradients that the processes currently hold, each its own part."""
        assert self._optimizer is not None
        local_gradients: Any = [SimpleNamespace(grad=gradient) for gradient in self._optimizer.gradients()]
        square = norm(local_gradients).double().square().to(communication_device(self.world))
        dist.all_reduce(square)
        return square.sqrt().float()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather the tensors on the host, in the first process only: the others have no memory for all of them."""
        assert self._optimizer is not None
        gathered: dict[int, torch.Tensor] = {}  # tensors that share memory in the model still do
        for name, tensor in tensors.items():
            if id(tensor) not in gathered:
                gathered[id(tensor)] = self._optimizer.whole(name, tensor)
                if not self.world.is_first:
                    gathered[id(tensor)] = torch.empty(0)
        return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if self.world.is_first else {}

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Copy trained weights and masters into place; return all tensors unchanged, since the optimizer takes its part
        of its state itself.
        """
        assert self._optimizer is not None
        for name in tensors.keys() & self._optimizer.parameters.keys():
            self._optimizer.set_weight(name, tensors[name])
        return tensors


class ZeroOptimizer:
    """Counterpart of `train.optim.MasterOptimizer` for ZeRO; every process must call each method.

    Attributes:
        model: the trained model.
        runtime: DeepSpeed's engine.
        zero: DeepSpeed's optimizer, which wraps ours.
        parts: the float32 weights that this process updates, one flat tensor per group.
        pending: whether there are gradients that no update has used.
        learning_rate: learning rate of the next `step`; set it before each.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: dict[str, torch.nn.Parameter],
        inner: torch.optim.AdamW,
        runtime: Any,
        stage: int,
    ) -> None:
        self.model, self.runtime, self.zero = model, runtime, runtime.optimizer
        self.parts: list[torch.Tensor] = (
            self.zero.single_partition_of_fp32_groups if stage < 3 else self.zero.fp32_partitioned_groups_flat
        )
        self.pending, self.learning_rate = False, 0.0
        self._trained, self._inner, self._stage = trained, inner, stage
        self._factor: float | None = None
        self._set_aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._fragments: Any = importlib.import_module("deepspeed.utils")
        inner.register_step_pre_hook(self._before_update)
        inner.register_step_post_hook(self._after_update)
        self.forget()
        if stage < 3:
            # DeepSpeed links a parameter to its moments after the first update; a checkpoint may be read before it.
            self.zero._lazy_init_hp_params_optimizer_state()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by their names in the model; in stage 3 only their shapes, on meta."""
        if self._stage < 3:
            return self._trained
        return {
            name: torch.nn.Parameter(torch.empty(p.ds_shape, dtype=p.dtype, device="meta"))  # type: ignore[attr-defined]
            for name, p in self._trained.items()
        }

    def gradients(self) -> list[torch.Tensor]:
        """Return this process's part of the mean gradient, after the backward pass of the last micro batch."""
        if self.runtime.zero_offload_optimizer() is not None:
            return [part.grad for part in self.parts if part.grad is not None]
        return [
            gradient for group_gradients in self.zero.averaged_gradients.values() for gradient in group_gradients or ()
        ]

    def step(self, factor: float = 1.0) -> None:
        """Update the weights; every gradient is multiplied by `factor` first, in float32."""
        self._take(factor)

    def zero_grad(self) -> None:
        """Drop the gradients: if no update has used them, DeepSpeed runs a step that updates nothing."""
        if self.pending:
            self._take(None)

    def _take(self, factor: float | None) -> None:
        self._factor, self.pending = factor, False
        for group in self._inner.param_groups:
            group["lr"] = self.learning_rate
        self.runtime.step()

    def _before_update(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        local_parts = [part for group in inner.param_groups for part in group["params"]]
        if self._factor is None:
            self._set_aside = [(part, part.grad) for part in local_parts]
            for part in local_parts:
                part.grad = None  # AdamW skips parameters without a gradient
        elif self._factor != 1.0:
            torch._foreach_mul_([part.grad for part in local_parts], self._factor)

    def _after_update(self, *_: Any) -> None:
        for part, gradient in self._set_aside:
            part.grad = gradient
        self._set_aside = []

    def forget(self) -> None:
        """Reset the state to that of a new optimizer."""
        for part in self.parts:
            state = self._inner.state[part]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].zero_() if key in state else torch.zeros_like(part)
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `train.optim.MasterOptimizer.tensors`, whole, on the host; empty outside the first
        process.
        """
        return {name: tensor for name, tensor in self._states() if dist.get_rank() == 0}

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        step = next(self._inner.state[part]["step"] for part in self.parts)
        for name, p in self._trained.items():
            if p.dtype != torch.float32:
                yield f"master.{name}", self._fragments.safe_get_full_fp32_param(p).cpu()
            yield f"step.{name}", step.cpu().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"{key}.{name}", self._fragments.safe_get_full_optimizer_state(p, key).cpu()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `tensors`, from any engine; each process passes all of them."""
        self.forget()
        for name, p in self._trained.items():
            if p.dtype != torch.float32:
                self._set_master(p, tensors[f"master.{name}"])
            for key in ("exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in tensors:
                    self._set_moment(p, tensors[f"{key}.{name}"], key)
        # All parameters of a run are updated in every step.
        step = max((int(tensors[name]) for name in tensors if name.startswith("step.")), default=0)
        for part in self.parts:
            self._inner.state[part]["step"].fill_(step)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the model as a single process would hold it, on the host."""
        parameter: Any = self._trained.get(name, tensor)
        if not hasattr(parameter, "ds_id"):
            return tensor.detach().cpu()
        zero = importlib.import_module("deepspeed.runtime.zero")
        with zero.GatheredParameters([parameter]):
            gathered: torch.Tensor = parameter.detach().cpu().clone()
        return gathered

    @torch.no_grad()
    def set_weight(self, name: str, value: torch.Tensor) -> None:
        """Set the value of a trained parameter and its master."""
        p: Any = self._trained[name]
        self._set_master(p, value)
        if self._stage < 3:
            p.copy_(value)
            return
        p.ds_tensor.copy_(self._own(p, value))
        if p.numel() == p.ds_numel:  # it is currently gathered
            p.copy_(value)

    def _set_master(self, p: Any, value: torch.Tensor) -> None:
        if self._stage < 3:
            self._fragments.safe_set_full_fp32_param(p, value.float())
        else:
            self._fragments.safe_set_local_fp32_param(p, self._own(p, value.float()))

    def _set_moment(self, p: Any, value: torch.Tensor, key: str) -> None:
        if self._stage < 3:
            self._fragments.safe_set_full_optimizer_state(p, value, key)
        else:
            self._fragments.safe_set_local_optimizer_state(p, self._own(p, value), key)

    def _own(self, p: Any, value: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole value, padded with zeros (DeepSpeed's own function fails without
        them).
        """
        size = p.ds_tensor.numel()
        part = value.flatten()[size * dist.get_rank() :][:size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))


class _WithLoss(torch.nn.Module):
    """Module for DeepSpeed whose forward pass returns the loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_of: LossFunction, batch: Batch) -> torch.Tensor:
        return loss_of(self.model, batch)


def build_deepspeed_config(section: ParallelSection, dtype: torch.dtype) -> dict[str, Any]:
    """Build the whole config for DeepSpeed: our settings, and the tuning in the user's own file.

    Args:
        dtype: data type of the trained parameters.
    """
    stage = MODES[section.mode].zero_stage
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    offload = {"offload_optimizer": host} | ({"offload_param": host} if stage == 3 else {})
    return {
        # Only read for logs. Two, because with one and offload DeepSpeed keeps only the last micro batch's gradient.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": read_deepspeed_tuning(section.deepspeed_config)
        | {"stage": stage}
        | (offload if section.offload else {}),
        **PRECISION[dtype],
    }


def read_deepspeed_tuning(path: str | None) -> dict[str, Any]:
    """Read the settings of `TUNING` in a user's DeepSpeed file; "auto" is left to DeepSpeed."""
    if path is None:
        return {}
    document = read_json_file(Path(path).expanduser())
    tuning = document.get("zero_optimization") if isinstance(document, dict) else None
    tuning = tuning if isinstance(tuning, dict) else {}
    return {key: value for key, value in tuning.items() if f"zero_optimization.{key}" in TUNING and value != "auto"}


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this process's device, silenced.

    Nothing in it is compiled: AdamW and the collectives are torch's own.

    Raises:
        MachineError: it is not installed, or does not fit this machine.
    """
    env.place_deepspeed(communication_device(world).type, world.local_rank)
    try:
        deepspeed = importlib.import_module("deepspeed")
    except (ImportError, RuntimeError) as error:
        raise MachineError(
            f"parallel.mode {' or '.join(ZERO)} needs DeepSpeed, which cannot be imported: {env.first_line(error)}",
            code="E5094",
            field="parallel.mode",
            help=f"{install_extra('deepspeed')}; or set parallel.mode: fsdp, which needs no other package",
        ) from error
    importlib.import_module("deepspeed.ops").__dict__["__compatible_ops__"] = defaultdict(bool)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed 0.19.8 calls collectives of torch 2.13 by their old names: users cannot do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed
