"""The process environment: the only file that reads or writes `os.environ`.

Tokens come from the environment or from a `.env` file beside the work, never from a config, and are never printed:
`redact` takes them out of any text on its way to a log or a file.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError

SECRET_NAMES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "OPENAI_API_KEY",
    "SUREFIT_API_KEY",
)
_SHAPE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|nvapi-[\w-]{20,}|gsk_\w{20,}|r8_\w{20,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
"""Access keys of the hub, OpenAI-like services, GitHub, AWS, GitLab, Slack, Google, NVIDIA, Groq, Replicate and PyPI,
and signed tokens."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@]+@")
"""A user and a password in front of a host."""
_IN_QUERY = re.compile(
    r"([?&](?:x-amz-)?(?:api[_-]?key|key|(?:access[_-]|auth[_-]|security-)?token|password|passwd|secret|sig|signature"
    r"|credential)=)(?!\*\*\*)[^\s&#\"'<>\\]+",
    re.IGNORECASE,
)
"""The value of a parameter of an address that opens something."""
_NAMED = re.compile(r"\b([A-Z0-9_]*(?:TOKEN|API_?KEY|_KEY|SECRET|PASSWORD|PASSWD)=)(?!\*\*\*|\$)[^\s\"'<>&;,\\]{8,}")
"""The value of a variable whose name says what it is."""

STEERING = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR",
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "WANDB_MODE", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD",
)  # fmt: skip
"""Variables that change how training runs. None of them holds a secret; one that may must not come here."""

DOTENV = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "SUREFIT_CACHE",
    "SUREFIT_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY",
)  # fmt: skip
"""What a `.env` file may set: docs/install.md and .env.example say what each means. None of them runs code."""
MAX_DOTENV_BYTES = 64 * 1024

LAUNCHED = "SUREFIT_LAUNCHED"
OOM_ADAPTATIONS_VARIABLE = "SUREFIT_ADAPTED"
_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Dotenv:
    """What a `.env` file did: the names that it set, and those that it named and may not set."""

    path: Path
    taken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def load_dotenv(directory: Path | None = None) -> Dotenv | None:
    """Read `.env` in `directory` (default: the working directory); what the environment already has wins.

    Only the names in `DOTENV` are taken. The directory may be somebody else's, and other variables run code
    (PYTHONPATH, LLAMA_CPP), or decide where the user's own token is sent (HF_ENDPOINT). For the same reason an address
    is left where what opens it is of the environment, and no variable but the home directory is filled in.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    path = (directory or Path.cwd()) / ".env"
    if not path.is_file():
        return None
    from dotenv import dotenv_values

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_DOTENV_BYTES + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise _bad_dotenv(path, f"cannot be read: {reason}") from None
    if len(text) > MAX_DOTENV_BYTES:
        raise _bad_dotenv(path, f"larger than {MAX_DOTENV_BYTES // 1024} KiB: these are no settings")
    read = dotenv_values(stream=io.StringIO(text), interpolate=False)
    values = {name: value for name, value in read.items() if value and name not in os.environ}
    taken = {name: value for name, value in values.items() if name in DOTENV and not _would_send_credentials(name)}
    for name, value in taken.items():
        if "\0" in value:
            raise _bad_dotenv(path, f"{name} holds a NUL")
    os.environ.update({name: value.replace("${HOME}", str(Path.home())) for name, value in taken.items()})
    _pass_on_the_hub_token()
    return Dotenv(path, tuple(taken), tuple(name for name in values if name not in taken))


def _would_send_credentials(name: str) -> bool:
    """Whether it is an address that would be asked with a password of the environment."""
    return name == "MLFLOW_TRACKING_URI" and any(
        os.environ.get(secret) for secret in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    )


def _bad_dotenv(path: Path, problem: str) -> ConfigError:
    return ConfigError(problem, code="E1051", path=path, help="fix it (lines NAME=value), or move it elsewhere")


def start_children_safely() -> None:
    """The same for every Python process that this one starts from now on: for a process that is all SureFit's."""
    os.environ["PYTHONSAFEPATH"] = "1"


def env_without_safepath() -> dict[str, str]:
    """The environment of another tool's script, which may need the modules beside it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


@contextmanager
def safe_path_for_children() -> Iterator[None]:
    """Python processes that are started meanwhile, by whatever library, import nothing from the working directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)
        else:
            os.environ["PYTHONSAFEPATH"] = before


HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def _pass_on_the_hub_token() -> None:
    """transformers loads with the token that huggingface_hub finds by itself, by the first two names only."""
    if (token := os.environ.get(HUB_TOKENS[-1])) and not any_set(HUB_TOKENS[:-1]):
        os.environ[HUB_TOKENS[0]] = token


def hub_token() -> str | None:
    """The Hugging Face token of the environment or of `huggingface-cli login`, if there is one."""
    for name in HUB_TOKENS:
        if os.environ.get(name):
            return os.environ[name]
    file = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def api_key() -> str | None:
    """What an OpenAI-compatible server is asked with, if it wants a key."""
    return os.environ.get("SUREFIT_API_KEY") or None


def hub_home() -> Path:
    """Where Hugging Face's libraries keep their files."""
    home = os.environ.get("HF_HOME")
    return Path(home).expanduser() if home else _user_cache() / "huggingface"


def hub_cache() -> Path:
    """Where downloaded models and data sets lie."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(cache).expanduser() if cache else hub_home() / "hub"


def offline() -> bool:
    """Whether the user asked Hugging Face's libraries not to use the network."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cache_dir() -> Path:
    """SureFit's own cache (tokenised data): `SUREFIT_CACHE`, or `surefit` in the user's cache directory."""
    own = os.environ.get("SUREFIT_CACHE")
    return Path(own).expanduser() if own else _user_cache() / "surefit"


def llama_cpp() -> Path | None:
    """The user's checkout of llama.cpp, whose converter makes GGUF files."""
    named = os.environ.get("LLAMA_CPP")
    return Path(named).expanduser() if named else None


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base).expanduser() if base else Path.home() / ".cache"


def visible_gpus() -> list[int] | None:
    """The GPUs that `CUDA_VISIBLE_DEVICES` lets this process use, by number; None where it does not restrict them.

    As CUDA reads it: the list ends at the first entry that names no GPU, so "" and "-1" hide them all. GPUs that are
    named by UUID cannot be told by number, and count as not restricted.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or text.strip().startswith(("GPU-", "MIG-")):
        return None
    entries = [entry.strip() for entry in text.split(",")]
    return [int(entry) for entry in takewhile(str.isdecimal, entries)]


def steering_variables() -> dict[str, str]:
    """Those of `STEERING` that are set."""
    return {name: os.environ[name] for name in STEERING if os.environ.get(name)}


def tracking_uri() -> str | None:
    """The tracking server that MLflow's own variable names."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def any_set(names: Iterable[str]) -> bool:
    """Whether any of these variables is set; never what it says."""
    return any(os.environ.get(name) for name in names)


def logged_in(host: str) -> bool:
    """Whether a login's file names this host; never what it says."""
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return host in netrc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def distributed_env() -> tuple[int, int, int, int]:
    """(rank, processes, rank on this machine, processes on this machine), as torchrun and accelerate launch set them,
    or srun where it starts each process itself; (0, 1, 0, 1) where nothing does."""
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        found = [os.environ.get(name, "") for name in names]
        if all(found):
            rank, size, local, per_node = (int(text.partition("(")[0].partition(",")[0]) for text in found)
            return rank, size, local, per_node
    return 0, 1, 0, 1


def child_env(rank: int, processes: int, port: int, adapted: Mapping[str, Any]) -> dict[str, str]:
    """The environment of one of several processes on this machine, as torchrun sets it, and that we started it.

    Args:
        port: where the first process will listen for the others.
        adapted: what `adapted` answers there.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
        OOM_ADAPTATIONS_VARIABLE: json.dumps(dict(adapted)),
    }
    threads = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // processes)}
    own = {name: str(value) for name, value in (threads | dict(os.environ) | place | meeting).items()}
    return own


def launched_here() -> bool:
    """Whether SureFit's own launcher started this process, which says itself what became of the others."""
    return LAUNCHED in os.environ


def read_oom_adaptations() -> dict[str, Any]:
    """What SureFit's own launcher has changed in the config, by dotted key, since memory ran out in a process that it
    started before this one."""
    changes: dict[str, Any] = json.loads(os.environ.get(OOM_ADAPTATIONS_VARIABLE, "{}"))
    return changes


def malloc_chosen() -> bool:
    """Whether the user has set how memory is allocated: a variable of glibc's malloc, or another malloc before it."""
    own = any(name.startswith("MALLOC_") for name, value in os.environ.items() if value)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return own or tuned or "malloc" in os.environ.get("LD_PRELOAD", "")


def quiet_libraries() -> None:
    """One progress line is ours: keep the libraries' own bars and banners away from it. Call before importing them."""
    _pass_on_the_hub_token()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # Said by us, so that tokenizers does not switch it off with a warning when a library forks the process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # transformers 5.17 to 5.23 deprecates an attribute that PEFT 0.19 to 0.21 reads: nothing a user can do about.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")
    # bitsandbytes 0.50, which PEFT imports for every model, looks for a kernel for CPUs with AVX512-BF16 and says that
    # it is not there (bitsandbytes-foundation/bitsandbytes#2064, open). It does without, and SureFit would not let it
    # use it: model/compat.py, `keep_four_bit_layout`.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_not_about_the_kernel)
    # PEFT imports DeepSpeed where it is installed, which warns on stdout that it sees no GPU and sets its own level.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def sleep_at_barriers() -> None:
    """Threads that wait for one another sleep, instead of spinning for some milliseconds first: beside other processes
    whoever they wait for gets the core. Read by OpenMP when torch is first imported, so call before that.

    GNU's OpenMP (torch's wheels for Linux) and Intel's and LLVM's know this variable. GOMP_SPINCOUNT and KMP_BLOCKTIME,
    where a user has set them, go before it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def threads_asked() -> int | None:
    """The CPU threads of a process that OMP_NUM_THREADS asks for, by its user's or a launcher's will."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _not_about_the_kernel(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")


def set_defaults(values: Mapping[str, str]) -> None:
    """Set the variables that nobody has set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def place_deepspeed(device: str, local_rank: int) -> None:
    """Tell DeepSpeed where it is, before it is imported: cuda or cpu, which it guesses wrong where the CUDA toolkit is
    and no GPU; and the rank on this machine, which srun does not call by torchrun's name."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))


def one_tokenizer_thread() -> None:
    """Keep tokenizers to this thread: for a process that is one of several, each at work on a core of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def redact(text: str) -> str:
    """`text` with every known secret, and everything that looks like one, replaced by `***`."""
    for name in SECRET_NAMES:
        value = os.environ.get(name)
        if value and len(value) >= 8:
            text = text.replace(value, "***")
    text = _SHAPE.sub("***", _IN_ADDRESS.sub("***@", text))
    return _NAMED.sub(r"\1***", _IN_QUERY.sub(r"\1***", text)) if "=" in text else text


def first_line(error: Exception, limit: int = 300) -> str:
    """The first line of another library's error, without secrets: the hub's messages run over paragraphs."""
    lines = redact(str(error)).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__
