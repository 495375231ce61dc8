"""The process environment: the only file that reads or writes `os.environ`.

Tokens come from the environment or from a `.env` file beside the user's work, never from a config, and are never
printed: `redact` removes them from any text on its way to a log or a file.
"""

from __future__ import annotations

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

from surefit.core.dotenv_file import parse_dotenv
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
"""User and password in front of a host in an address."""
_IN_QUERY = re.compile(
    r"([?&](?:x-amz-)?(?:api[_-]?key|key|(?:access[_-]|auth[_-]|security-)?token|password|passwd|secret|sig|signature"
    r"|credential)=)(?!\*\*\*)[^\s&#\"'<>\\]+",
    re.IGNORECASE,
)
"""Value of an address parameter that grants access."""
_NAMED = re.compile(r"\b([A-Z0-9_]*(?:TOKEN|API_?KEY|_KEY|SECRET|PASSWORD|PASSWD)=)(?!\*\*\*|\$)[^\s\"'<>&;,\\]{8,}")
"""Value of a variable whose name marks it as a secret."""

STEERING = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR",
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "WANDB_MODE", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD",
)  # fmt: skip
"""Variables that change how training runs; `check` and `doctor` report them. None of them holds a secret; never add one
that may.
"""

DOTENV = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "SUREFIT_CACHE",
    "SUREFIT_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY",
)  # fmt: skip
"""Variables that a `.env` file may set: docs/install.md and .env.example describe each. None of them runs code."""
MAX_DOTENV_BYTES = 64 * 1024

LAUNCHED = "SUREFIT_LAUNCHED"
OOM_ADAPTATIONS_VARIABLE = "SUREFIT_ADAPTED"
_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Dotenv:
    """Effect of a `.env` file: the names that it set, and the names that it may not set."""

    path: Path
    accepted: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def load_dotenv(directory: Path | None = None) -> Dotenv | None:
    """Read `.env` in `directory` (default: the working directory); existing environment variables take precedence.

    Only the names in `DOTENV` are set. The directory may belong to somebody else, and other variables run code
    (PYTHONPATH, LLAMA_CPP), or decide where the user's own token is sent (HF_ENDPOINT). For the same reason an address
    is not set where its credentials come from the environment, and no variable but the home directory is substituted.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = (directory or Path.cwd()) / ".env"
    if not path.is_file():
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_DOTENV_BYTES + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise _bad_dotenv(path, f"cannot be read: {reason}") from None
    if len(text) > MAX_DOTENV_BYTES:
        raise _bad_dotenv(path, f"larger than {MAX_DOTENV_BYTES // 1024} KiB: not a settings file")
    settings = parse_dotenv(text)
    new_values = {name: value for name, value in settings.items() if value and name not in os.environ}
    accepted = {
        name: value for name, value in new_values.items() if name in DOTENV and not _would_send_credentials(name)
    }
    for name, value in accepted.items():
        if "\0" in value:
            raise _bad_dotenv(path, f"{name} contains a NUL character")
    os.environ.update({name: value.replace("${HOME}", str(Path.home())) for name, value in accepted.items()})
    _pass_on_the_hub_token()
    return Dotenv(path, tuple(accepted), tuple(name for name in new_values if name not in accepted))


def _would_send_credentials(name: str) -> bool:
    """Return whether the variable is an address to which a password of the environment would be sent."""
    return name == "MLFLOW_TRACKING_URI" and any(
        os.environ.get(secret) for secret in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    )


def _bad_dotenv(path: Path, problem: str) -> ConfigError:
    return ConfigError(problem, code="E1051", path=path, help="fix it (lines NAME=value), or move it elsewhere")


def start_children_safely() -> None:
    """Set safe-path mode for all Python processes that this process starts: for a process that runs only SureFit's
    code.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def env_without_safepath() -> dict[str, str]:
    """Return the environment for another tool's script, which may need the modules beside it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


@contextmanager
def safe_path_for_children() -> Iterator[None]:
    """Keep Python processes that any library starts meanwhile from importing modules of the working directory."""
    previous_value = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if previous_value is None:
            os.environ.pop("PYTHONSAFEPATH", None)
        else:
            os.environ["PYTHONSAFEPATH"] = previous_value


HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def _pass_on_the_hub_token() -> None:
    """Copy the hub token to the name that transformers reads: huggingface_hub itself knows only the first two names."""
    if (token := os.environ.get(HUB_TOKENS[-1])) and not any_set(HUB_TOKENS[:-1]):
        os.environ[HUB_TOKENS[0]] = token


def hub_token() -> str | None:
    """Return the Hugging Face token of the environment or of `huggingface-cli login`, or None."""
    for name in HUB_TOKENS:
        if os.environ.get(name):
            return os.environ[name]
    file = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def api_key() -> str | None:
    """Return the key for OpenAI-compatible servers, or None."""
    return os.environ.get("SUREFIT_API_KEY") or None


def hub_home() -> Path:
    """Return the directory of Hugging Face's libraries."""
    home = os.environ.get("HF_HOME")
    return Path(home).expanduser() if home else _user_cache() / "huggingface"


def hub_cache() -> Path:
    """Return the directory of downloaded models and data sets."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(cache).expanduser() if cache else hub_home() / "hub"


def offline() -> bool:
    """Return whether the user switched off the network for Hugging Face's libraries."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cache_dir() -> Path:
    """Return SureFit's own cache (tokenized data): `SUREFIT_CACHE`, or `surefit` in the user's cache directory."""
    directory = os.environ.get("SUREFIT_CACHE")
    return Path(directory).expanduser() if directory else _user_cache() / "surefit"


def llama_cpp() -> Path | None:
    """Return the user's checkout of llama.cpp, with the converter for GGUF files."""
    directory = os.environ.get("LLAMA_CPP")
    return Path(directory).expanduser() if directory else None


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base).expanduser() if base else Path.home() / ".cache"


def visible_gpus() -> list[int] | None:
    """Return the numbers of the GPUs that `CUDA_VISIBLE_DEVICES` allows; None where it does not restrict them.

    Parsed as by CUDA: the list ends at the first entry that names no GPU, so "" and "-1" hide them all. GPUs named by
    UUID have no number here, and count as not restricted.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or text.strip().startswith(("GPU-", "MIG-")):
        return None
    entries = [entry.strip() for entry in text.split(",")]
    return [int(entry) for entry in takewhile(str.isdecimal, entries)]


def steering_variables() -> dict[str, str]:
    """Return the variables of `STEERING` that are set."""
    return {name: os.environ[name] for name in STEERING if os.environ.get(name)}


def tracking_uri() -> str | None:
    """Return the tracking server in MLflow's own variable, or None."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def any_set(names: Iterable[str]) -> bool:
    """Return whether any of these variables is set, without its value."""
    return any(os.environ.get(name) for name in names)


def logged_in(host: str) -> bool:
    """Return whether the .netrc file mentions this host, without its contents."""
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return host in netrc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def distributed_env() -> tuple[int, int, int, int]:
    """Return (rank, processes, rank on this machine, processes on this machine), as torchrun and accelerate launch set
    them, or srun where it starts each process itself; (0, 1, 0, 1) without a launcher.
    """
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        values = [os.environ.get(name, "") for name in names]
        if all(values):
            rank, size, local, per_node = (int(text.partition("(")[0].partition(",")[0]) for text in values)
            return rank, size, local, per_node
    return 0, 1, 0, 1


def child_env(rank: int, processes: int, port: int, adapted: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of one of several processes on this machine, as torchrun sets it, with our launcher's
    mark.

    Args:
        port: port on which the first process will listen for the others.
        adapted: the changes that `read_oom_adaptations` returns there.
    """
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
        OOM_ADAPTATIONS_VARIABLE: json.dumps(dict(adapted)),
    }
    threads = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // processes)}
    variables = {name: str(value) for name, value in (threads | dict(os.environ) | ranks | rendezvous).items()}
    return variables


def launched_here() -> bool:
    """Return whether SureFit's own launcher started this process; the launcher itself reports lost processes."""
    return LAUNCHED in os.environ


def read_oom_adaptations() -> dict[str, Any]:
    """Return the config changes, by dotted key, that SureFit's own launcher made after an earlier process ran out of
    memory.
    """
    changes: dict[str, Any] = json.loads(os.environ.get(OOM_ADAPTATIONS_VARIABLE, "{}"))
    return changes


def malloc_chosen() -> bool:
    """Return whether the user has configured the allocator: a variable of glibc's malloc, or a preloaded malloc."""
    configured = any(name.startswith("MALLOC_") for name, value in os.environ.items() if value)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return configured or tuned or "malloc" in os.environ.get("LD_PRELOAD", "")


def quiet_libraries() -> None:
    """Silence the progress bars and banners of libraries, which would break SureFit's progress line. Call before
    importing them.
    """
    _pass_on_the_hub_token()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # Set explicitly, so that tokenizers does not switch it off with a warning when a library forks the process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # transformers 5.17 to 5.23 deprecates an attribute that PEFT 0.19 to 0.21 reads: users cannot do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")
    # bitsandbytes 0.50, which PEFT imports for every model, looks for a kernel for CPUs with AVX512-BF16 and warns that
    # it is missing (bitsandbytes-foundation/bitsandbytes#2064, open). It works without, and SureFit would not let it
    # use the kernel: model/compat.py, `keep_four_bit_layout`.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_not_about_the_kernel)
    # Without a network the hub's client warns of each request that it repeats; the error says that there is no network.
    logging.getLogger("huggingface_hub.utils._http").addFilter(_not_about_a_repeated_request)
    # PEFT imports DeepSpeed if it is installed, which warns on stdout that it sees no GPU and sets its own log level.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def sleep_at_barriers() -> None:
    """Let threads sleep at barriers instead of spinning for some milliseconds: beside other processes, the thread that
    they wait for gets the core. OpenMP reads the setting when torch is first imported: call before that.

    GNU's OpenMP (torch's wheels for Linux) and Intel's and LLVM's know this variable. GOMP_SPINCOUNT and KMP_BLOCKTIME,
    if a user has set them, take precedence.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def threads_asked() -> int | None:
    """Return the number of CPU threads in OMP_NUM_THREADS, set by the user or a launcher; None if it is not set."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _not_about_a_repeated_request(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return " thrown while requesting " not in text and not text.startswith("Retrying in ")


def _not_about_the_kernel(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")


def set_defaults(values: Mapping[str, str]) -> None:
    """Set the variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def place_deepspeed(device: str, local_rank: int) -> None:
    """Set DeepSpeed's device and local rank before it is imported: cuda or cpu, which it guesses wrong if the CUDA
    toolkit is installed without a GPU; and the rank on this machine, for which srun uses another name than torchrun.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))


def one_tokenizer_thread() -> None:
    """Keep tokenizers to this thread: for one of several worker processes that each have one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def redact(text: str) -> str:
    """Return `text` with every known secret, and everything that looks like one, replaced by `***`."""
    for name in SECRET_NAMES:
        value = os.environ.get(name)
        if value and len(value) >= 8:
            text = text.replace(value, "***")
    text = _SHAPE.sub("***", _IN_ADDRESS.sub("***@", text))
    return _NAMED.sub(r"\1***", _IN_QUERY.sub(r"\1***", text)) if "=" in text else text


def first_line(error: Exception, limit: int = 300) -> str:
    """Return the first line of another library's error, without secrets: the hub's messages have several paragraphs."""
    lines = redact(str(error)).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__
