"""ENV: what this machine, as it is set up now, will not do."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import Config
from surefit.core.errors import MachineError
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.lint.rule import Finding, LintContext, rule


@rule("ENV001", "offline-without-weights", severity="error", needs=(ModelFacts, HardwareFacts, EnvironmentFacts))
def offline_without_weights(
    context: LintContext, model: ModelFacts, hardware: HardwareFacts, environment: EnvironmentFacts
) -> Iterator[Finding]:
    """The weights would have to be downloaded, and the network is switched off.

    ## What it does
    Looks for a model whose weights are not on this machine while `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set. Not
    where the config names a GPU that this machine does not have: then it is meant for another machine.

    ## Why it is bad
    Training stops at loading, with an error about a missing file that names neither reason.

    ## Example
    `HF_HUB_OFFLINE=1` in a batch job, and a model that was never downloaded on that cluster.

    ## Fix
    Download it first, `hf download NAME`, or unset the variable.

    ## Evidence
    Compute nodes without network are the rule on clusters; their documentation recommends this variable.
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
    needs=(
        Config,
        HardwareFacts,
    ),
)
def gpu_not_used(context: LintContext, config: Config, hardware: HardwareFacts) -> Iterator[Finding]:
    """This machine has a GPU, and the installed PyTorch cannot use it.

    ## What it does
    Compares what the driver reports (nvidia-smi) with the build of the installed PyTorch (a version ending in +cpu).

    ## Why it is bad
    The run works, a hundred times slower than it could.

    ## Example
    PyTorch 2.13.0+cpu on a machine with an H100.

    ## Fix
    Install a CUDA build of PyTorch (https://pytorch.org/get-started/locally/), or write `hardware.gpu: cpu` if the CPU
    is meant.

    ## Evidence
    `pip install torch` with an index meant for continuous integration installs the CPU build without a word.
    """
    if hardware.unused_gpu and config.hardware.gpu == "auto":
        yield Finding(
            field="hardware.gpu",
            message=f"{hardware.unused_gpu} is here, but the installed PyTorch is a CPU-only build",
            help="install a CUDA build of PyTorch, or write hardware.gpu: cpu if the CPU is meant",
        )


@rule("ENV003", "fact-not-reachable", severity="warning")
def fact_not_reachable(context: LintContext) -> Iterator[Finding]:
    """Something outside this machine could not be asked, so parts were not checked.

    ## What it does
    Reports errors of the machine or the network that came up while facts were gathered.

    ## Why it is bad
    The rules that need those facts were skipped, and the run will probably meet the same error.

    ## Example
    The hub does not answer, so the size of a model that is not in the catalogue is not known.

    ## Fix
    As the finding says.

    ## Evidence
    A check that passes because it could not look is worse than none.
    """
    for problem in context.problems:
        if isinstance(problem, MachineError):
            yield Finding.of(problem)
