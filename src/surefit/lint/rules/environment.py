"""ENV: settings of this machine that stop the run or slow it down."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import SureFitConfig
from surefit.core.errors import MachineError
from surefit.facts.attention import KERNEL_DTYPES
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts
from surefit.facts.threads import SMALL_MODEL
from surefit.lint.rule import ConfigFix, Finding, LintContext, rule

MANY_CORES = 4
NO_P2P = "RTX 40"
"""GPUs whose driver may not allow peer-to-peer copies: accelerate itself switches it off for them."""
OLDEST_FOR_FLASH = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}
DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ({"1"}, "the CPU waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ({"1"}, "the driver allocates and frees every tensor"),
}
DEBUGGING_SEVERAL = {
    "NCCL_DEBUG": ({"TRACE"}, "NCCL logs every call"),
    "TORCH_DISTRIBUTED_DEBUG": ({"DETAIL"}, "the shapes of every collective are first compared across ranks"),
    "NCCL_BLOCKING_WAIT": ({"1"}, "every collective blocks the process"),
    "TORCH_NCCL_BLOCKING_WAIT": ({"1"}, "every collective blocks the process"),
}
"""Variable → its debugging values, and their cost; `DEBUGGING_SEVERAL` applies to runs of several processes."""


@rule("ENV001", "offline-without-weights", severity="error")
def offline_without_weights(
    model: ModelFacts, hardware: HardwareFacts, environment: EnvironmentFacts
) -> Iterator[Finding]:
    """The weights have to be downloaded, but offline mode is on.

    ## What it does
    Looks for a model whose weights are not on this machine while `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set.
    Skipped if the config names a GPU that this machine does not have: then the run is planned for another machine.

    ## Why it is bad
    Training stops at loading, with an error about a missing file that does not mention offline mode.

    ## Example
    `HF_HUB_OFFLINE=1` in a batch job, and a model that was never downloaded on that cluster.

    ## Fix
    Download it first, `hf download NAME`, or unset the variable.

    ## Evidence
    Compute nodes of clusters usually have no network; cluster documentation recommends this variable.
    """
    absent = model.source in ("catalogue", "hub") or (model.source == "cache" and not model.has_weights)
    if absent and environment.offline and hardware.source == "detected":
        yield Finding(
            field="model.name_or_path",
            message=f"the weights of {model.name} are not on this machine, and offline mode is on",
            help=f"run `hf download {model.name}` where there is a network, or unset HF_HUB_OFFLINE",
        )


@rule(
    "ENV002",
    "gpu-not-used",
    severity="warning",
)
def gpu_not_used(config: SureFitConfig, hardware: HardwareFacts) -> Iterator[Finding]:
    """This machine has a GPU, but the installed PyTorch cannot use it.

    ## What it does
    Compares what the driver reports (nvidia-smi) with the build of the installed PyTorch (a version ending in +cpu).

    ## Why it is bad
    The run works, a hundred times slower than it could.

    ## Example
    PyTorch 2.13.0+cpu on a machine with an H100.

    ## Fix
    Install a CUDA build of PyTorch (https://pytorch.org/get-started/locally/), or set `hardware.gpu: cpu` to train on
    the CPU.

    ## Evidence
    `pip install torch` with an index meant for continuous integration silently installs the CPU build.
    """
    if hardware.unused_gpu and config.hardware.gpu == "auto":
        yield Finding(
            field="hardware.gpu",
            message=f"this machine has {hardware.unused_gpu}, but the installed PyTorch is a CPU-only build",
            help="install a CUDA build of PyTorch, or set hardware.gpu: cpu to train on the CPU",
        )


@rule("ENV003", "fact-not-reachable", severity="warning")
def fact_not_reachable(context: LintContext) -> Iterator[Finding]:
    """Information about the machine or the network is missing, so some rules were skipped.

    ## What it does
    Reports errors of the machine or the network that were raised while the check gathered information.

    ## Why it is bad
    The rules that need this information were skipped, and the run will probably raise the same error.

    ## Example
    The hub does not respond, so the size of a model that is not in the catalogue is unknown.

    ## Fix
    The finding says what to do.

    ## Evidence
    A check that passes because it lacked information is misleading.
    """
    for problem in context.problems:
        if isinstance(problem, MachineError):
            yield Finding.of(problem)


@rule("ENV004", "threads-against-cores", severity="warning")
def threads_against_cores(
    context: LintContext, setup: Setup, hardware: HardwareFacts, stack: StackFacts
) -> Iterator[Finding]:
    """OMP_NUM_THREADS sets more threads than there are cores, or leaves all but one core idle.

    ## What it does
    Multiplies `OMP_NUM_THREADS` by the processes on this machine. Flags more threads than cores, and a single thread if
    a model of over 20 million parameters is trained on a CPU with at least four cores.

    ## Why it is bad
    Too many threads compete for cores and caches. Too few leave the machine idle: on a CPU, training speed depends on
    the number of threads.

    ## Example
    `OMP_NUM_THREADS=32` in a profile script, and eight processes on 32 cores.

    ## Fix
    Set `OMP_NUM_THREADS` to the number of cores divided by the number of processes.

    ## Evidence
    pytorch/pytorch#22260: on a machine with many GPUs, speed fell beyond four processes until the variable was set.
    torchrun sets it to 1 if it is not set.
    """
    text, cores = stack.variables.get("OMP_NUM_THREADS", ""), hardware.cpu_count
    if not text.isdecimal() or hardware.source != "detected":
        return
    threads, processes = int(text), _processes_here(setup)
    is_large = context.model is not None and (context.model.parameters or 0) >= SMALL_MODEL
    if threads * processes > cores:
        product = f"{processes} processes × {threads} threads" if processes > 1 else f"{threads} threads"
        message = f"OMP_NUM_THREADS={threads}: {product} on {cores} cores"
    elif threads * processes == 1 and hardware.kind == "cpu" and cores >= MANY_CORES and is_large:
        message = f"OMP_NUM_THREADS=1: only one of {cores} cores would be used"
    else:
        return
    yield Finding(message=message, help=f"export OMP_NUM_THREADS={max(1, cores // processes)}")


def _processes_here(setup: Setup) -> int:
    """Return the number of processes that train on one machine."""
    per_machine = (setup.processes or 1) // max(1, setup.machines or 1)
    return max(1, setup.processes_per_machine or per_machine)


@rule("ENV005", "nccl-settings-left-on", severity="warning")
def nccl_settings_left_on(setup: Setup, hardware: HardwareFacts, stack: StackFacts) -> Iterator[Finding]:
    """An environment variable slows the GPUs' communication down or prevents it.

    ## What it does
    Looks, in a run on several GPUs, for `NCCL_P2P_DISABLE=1` (not with RTX 40 cards, which need it),
    `NCCL_IB_DISABLE=1` over several machines with InfiniBand, and for the loopback interface over several machines.

    ## Why it is bad
    The first two send gradients through host memory or over TCP: the run works, but several times slower. With the
    third, each machine waits for the others at its own address until the timeout.

    ## Example
    `export NCCL_P2P_DISABLE=1`, once set to get past a hang on another machine.

    ## Fix
    Unset the variable. If the run then hangs, find the cause: too little /dev/shm in a container, or ACS in the BIOS.

    ## Evidence
    NVIDIA/nccl#286: "lo is loopback so you won't be able to use it between two nodes". accelerate sets the first two
    itself, for RTX 40 cards with an old driver.
    """
    several_processes = max(setup.processes or 1, setup.gpus or 1) > 1
    machines = setup.machines or 1
    if not several_processes or setup.on_cpu or hardware.source != "detected":
        return
    variables, on_gpu = stack.variables, hardware.kind == "cuda"
    if variables.get("NCCL_P2P_DISABLE") == "1" and on_gpu and NO_P2P not in hardware.name:
        yield _unset("NCCL_P2P_DISABLE=1: the GPUs of one machine exchange data through host memory")
    if variables.get("NCCL_IB_DISABLE") == "1" and machines > 1 and stack.infiniband and on_gpu:
        yield _unset(f"NCCL_IB_DISABLE=1: {machines} machines communicate over TCP, although this one has InfiniBand")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if variables.get(name, "").lstrip("=") == "lo" and machines > 1:
            yield _unset(f"{name}={variables[name]}: {machines} machines cannot connect over the loopback interface")


def _unset(message: str) -> Finding:
    return Finding(message=message, help=f"unset {message.partition('=')[0]}")


@rule("ENV006", "debugging-switch-left-on", severity="warning")
def debugging_switch_left_on(setup: Setup, hardware: HardwareFacts, stack: StackFacts) -> Iterator[Finding]:
    """A debugging variable is set that slows the run down.

    ## What it does
    Looks, in a run on a GPU, for `CUDA_LAUNCH_BLOCKING=1` and `PYTORCH_NO_CUDA_MEMORY_CACHING=1`; in runs with several
    processes also for `NCCL_DEBUG=TRACE`, `TORCH_DISTRIBUTED_DEBUG=DETAIL` and blocking waits.

    ## Why it is bad
    The CPU waits for the GPU after each kernel, or the log grows by gigabytes. The results are correct, so it goes
    unnoticed.

    ## Example
    `CUDA_LAUNCH_BLOCKING=1` in a job script since the last device-side assert.

    ## Fix
    Unset the variable; when you need it, set it for a run of ten steps.

    ## Evidence
    https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924; pytorch/pytorch#50820 on
    blocking waits; NCCL's documentation calls TRACE a level for deep debugging.
    """
    if hardware.kind != "cuda" or hardware.source != "detected" or setup.on_cpu:
        return
    several_processes = max(setup.processes or 1, setup.gpus or 1) > 1
    for name, (values, cost) in (DEBUGGING | (DEBUGGING_SEVERAL if several_processes else {})).items():
        value = stack.variables.get(name, "")
        if value.upper() in values:
            yield _unset(f"{name}={value}: {cost}")


@rule("ENV007", "attention-not-on-this-device", severity="error")
def attention_not_on_this_device(setup: Setup, hardware: HardwareFacts) -> Iterator[Finding]:
    """FlashAttention does not support this device or dtype.

    ## What it does
    Compares `speed.attention` with the compute capability (8.0 for version 2, 9.0 for version 3) and with `model.dtype`
    (bfloat16 or float16).

    ## Why it is bad
    The run stops when the model is loaded.

    ## Example
    `attention: flash_attention_2` on a T4, or with `dtype: float32`.

    ## Fix
    Set `speed.attention` to auto: packing works with torch's own kernels.

    ## Evidence
    Dao-AILab/flash-attention's README: Ampere and later for version 2, Hopper for version 3; fp16 and bf16 only.
    """
    oldest = OLDEST_FOR_FLASH.get(setup.attention or "")
    if setup.tool != "surefit" or oldest is None:
        return
    if (hardware.compute_capability or (0, 0)) < oldest:
        problem = (
            f"{setup.attention} needs a GPU of compute capability {oldest[0]}.{oldest[1]} or newer, not {hardware.name}"
        )
    elif setup.dtype is not None and setup.dtype not in KERNEL_DTYPES:
        problem = f"{setup.attention} supports {' and '.join(KERNEL_DTYPES)}, not {setup.dtype}"
    else:
        return
    yield Finding(
        field="attention",
        message=problem,
        help="set speed.attention to auto",
        fix=ConfigFix("speed.attention", "auto"),
    )
