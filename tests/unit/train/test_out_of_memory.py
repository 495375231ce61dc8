"""What is said when memory runs out, and the ladder of configurations that need less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefit.config.oom_ladder import as_arguments, next_rung
from surefit.config.schema import SureFitConfig
from surefit.facts.model import ModelFacts, model_facts
from surefit.model.memory_errors import is_out_of_memory
from surefit.train.out_of_memory import OutOfMemory, explain_out_of_memory


def config(**sections: Any) -> SureFitConfig:
    train = {"global_batch_size": 12, "per_device_train_batch_size": 12, "gradient_checkpointing": False}
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": "any", "dtype": "bfloat16"} | sections.get("model", {}),
            "lora": sections.get("lora", {}),
            "data": {"train": "unused", "packing": False},
            "train": train | sections.get("train", {}),
            "speed": {"chunked_loss": False, "tiled_mlp": False, "fused_lora": False} | sections.get("speed", {}),
            "output_dir": "unused",
        }
    )


def raised(
    error: Exception, settings: SureFitConfig, model: ModelFacts | None = None, kind: str = "cuda"
) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory("in step 3", settings, model, kind, longest=2048):
        raise error
    return caught.value


def test_the_ladder_from_top_to_bottom() -> None:
    settings = config()
    rungs = []
    while changes := next_rung(settings, "cuda"):
        rungs.append(changes)
        tree = settings.model_dump()
        for dotted, value in changes.items():
            section, key = dotted.split(".")
            tree[section][key] = value
        settings = SureFitConfig.model_validate(tree)
    assert rungs == [
        {"train.per_device_train_batch_size": 6},
        {"train.per_device_train_batch_size": 3},
        {"train.per_device_train_batch_size": 1},
        {"train.gradient_checkpointing": "selective"},
        {"train.gradient_checkpointing": True},
        {"speed.chunked_loss": True, "speed.tiled_mlp": True},
        {"train.gradient_checkpointing": "offload"},
    ]
    assert settings.train.global_batch_size == 12


def test_nothing_is_offloaded_from_a_cpu() -> None:
    lowest = config(
        train={"per_device_train_batch_size": 1, "gradient_checkpointing": True},
        speed={"chunked_loss": True, "tiled_mlp": True},
    )
    assert next_rung(lowest, "cpu") == {}
    assert next_rung(lowest, "cuda") == {"train.gradient_checkpointing": "offload"}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("ncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 'out of memory'"),
    ],
    ids=["cuda", "python", "linux", "windows", "cuda runtime", "cublas", "nccl"],
)
def test_every_way_to_say_it(error: Exception) -> None:
    assert is_out_of_memory(error)
    found = raised(error, config())
    assert found.changes == {"train.per_device_train_batch_size": 6}
    assert found.exit_code == 3


def test_torch_itself_says_it_so() -> None:
    """The text of the allocator of this version: 2^60 bytes are on no machine."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_other_errors_pass() -> None:
    with (
        pytest.raises(RuntimeError, match="size mismatch"),
        explain_out_of_memory("in step 3", config(), None, "cpu", 9),
    ):
        raise RuntimeError("size mismatch")


def test_the_largest_term_is_named_in_the_users_numbers() -> None:
    found = raised(MemoryError(), config(), model_facts("meta-llama/Llama-3.1-8B"))
    assert found.message.startswith(
        "the GPU's memory ran out in step 3, with micro batches of 12 rows of up to 2,048 tokens; the largest part is "
    )
    assert "GiB" in found.message
    assert (
        "try --set train.per_device_train_batch_size=6 (same training result; --adapt does it automatically)"
        in found.help
    )
    assert "--set data.max_length=1024, --set model.quantization=nf4 also save memory" in found.help


def test_a_gpus_workspace_is_no_part_of_a_machines_memory() -> None:
    small = {"train": {"per_device_train_batch_size": 1, "global_batch_size": 1}, "speed": {"chunked_loss": True}}
    found = raised(MemoryError(), config(**small), model_facts("surefit/nano"), "cpu")
    assert "the machine's memory ran out in step 3" in found.message
    assert "the largest part is" in found.message
    assert "workspace" not in found.message


def test_at_the_bottom_only_what_changes_learning_is_left() -> None:
    lowest = config(
        train={"method": "full", "per_device_train_batch_size": 1, "gradient_checkpointing": "offload"},
        speed={"chunked_loss": True, "tiled_mlp": True},
    )
    found = raised(MemoryError(), lowest)
    assert found.changes == {}
    assert found.help == (
        "the remaining options change the training result: --set data.max_length=1024, --set train.optim=adamw_8bit, "
        "or a smaller model"
    )


def test_arguments_are_what_set_reads() -> None:
    assert as_arguments({"train.gradient_checkpointing": "selective"}) == "--set train.gradient_checkpointing=selective"
