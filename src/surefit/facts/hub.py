"""A model's small files from the Hugging Face hub: config.json, its chat template, the headers of its weights.

`huggingface_hub` (a fifth of a second to import) is only loaded when a name is not found on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from surefit.core import env
from surefit.core.errors import MachineError, ModelError, did_you_mean
from surefit.facts.named_templates import DEFAULT, TEMPLATE_DIR, TEMPLATE_FILE, TOOL_USE
from surefit.facts.safetensors import INDEX, SINGLE, TensorHeader
from surefit.facts.validate_model_files import read_json_object, require_sound_config, templates_of


@dataclass(frozen=True)
class HubModel:
    """The files fetched; `tensors` is None where the repository holds no safetensors weights."""

    config: dict[str, Any]
    tensors: dict[str, TensorHeader] | None
    templates: dict[str, str]
    pickle_only: bool
    gated: bool


PATIENCE_S = 2.0
"""Seconds that a check waits for the hub's first answer; it works without one."""
MORE = 10
"""Multiple of that for all answers together, after the hub's first answer."""


def fetch(name: str, revision: str | None, known: Sequence[str] = (), patience: float | None = None) -> HubModel:
    """Fetch a model's small files from the hub; they are kept in the Hugging Face cache.

    Args:
        name: the hub id.
        revision: branch, tag or commit.
        known: names for "did you mean".
        patience: seconds to wait for the first answer; None leaves it to huggingface_hub, whose time-outs and repeated
            attempts add up to minutes.

    Raises:
        ModelError: no such model or revision, no access to it, or no config.json in it.
        MachineError: the hub cannot be reached, or the user works offline.
    """
    if env.offline():
        raise MachineError(
            f"{name} is not on this machine, and offline mode is on", code="E2069", help=_OFFLINE_HELP.format(name)
        )
    import huggingface_hub  # noqa: F401  (slow to import, which is not the hub's fault)

    heard = Event()
    if patience is None:
        return _fetched(name, revision, known, heard)
    return _within(patience, heard, name, lambda: _fetched(name, revision, known, heard))


def _within(patience: float, heard: Event, name: str, look: Callable[[], HubModel]) -> HubModel:
    """Return the result of `look`, if the hub answers in time. A thread that still waits dies with the process."""
    answers: SimpleQueue[HubModel | BaseException] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(look())
        except BaseException as error:  # re-raised in the calling thread
            answers.put(error)
        heard.set()

    Thread(target=ask, daemon=True, name="hub").start()
    answer: HubModel | BaseException | None = None
    if heard.wait(patience):
        with suppress(Empty):
            answer = answers.get(timeout=MORE * patience)
    if answer is None:
        raise MachineError(
            f"the Hugging Face hub did not answer about {name} within {patience:g} s",
            code="E2070",
            help=f"check the network, or set HF_HUB_OFFLINE=1; {_DOWNLOAD_HELP.format(name)}",
        )
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _fetched(name: str, revision: str | None, known: Sequence[str], heard: Event) -> HubModel:
    from huggingface_hub import HfApi, hf_hub_download

    token = env.hub_token()
    with hub_errors(name, revision, known):
        api = HfApi(token=token)
        info = api.model_info(name, revision=revision)
        heard.set()
        files = {sibling.rfilename for sibling in info.siblings or ()}
        if "config.json" not in files:
            raise ModelError(
                f"{name} on the hub has no config.json",
                code="E2071",
                help="choose a repository in transformers format",
            )

        def download(file: str) -> Path:
            return Path(hf_hub_download(name, file, revision=revision, token=token))

        config = read_json_object(download("config.json"))
        require_sound_config(config, f"{name}/config.json")
        tensors = _headers(api, name, revision) if files & {SINGLE, INDEX} else None
        return HubModel(
            config,
            tensors,
            _templates(files, download),
            pickle_only=tensors is None and any(fnmatch(file, "pytorch_model*.bin") for file in files),
            gated=bool(info.gated),
        )


_DOWNLOAD_HELP = "a downloaded model (`hf download {}`) is read without the hub"
_OFFLINE_HELP = "download the model first (`hf download {}`), or unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"


def _headers(api: Any, name: str, revision: str | None) -> dict[str, TensorHeader]:
    metadata = api.get_safetensors_metadata(name, revision=revision)
    return {
        tensor_name: TensorHeader(info.dtype, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for file in metadata.files_metadata.values()
        for tensor_name, info in file.tensors.items()
    }


def _templates(files: set[str], download: Any) -> dict[str, str]:
    """Return the model's chat templates by name, as `facts.named_templates.templates_in` reads a folder."""
    paths = {DEFAULT: TEMPLATE_FILE, TOOL_USE: f"{TEMPLATE_DIR}/{TOOL_USE}.jinja"}
    templates = {name: download(file).read_text(encoding="utf-8") for name, file in paths.items() if file in files}
    if templates or "tokenizer_config.json" not in files:
        return templates
    return templates_of(read_json_object(download("tokenizer_config.json")))


@contextmanager
def hub_errors(name: str, revision: str | None, known: Sequence[str]) -> Iterator[None]:
    """Convert huggingface_hub's exceptions to ours."""
    from huggingface_hub import errors

    # httpx in huggingface_hub 1, httpx2 in 2: its own module is the only place with the right one for both.
    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{name} is gated: its owner has to grant you access",
            code="E2072",
            help=f"accept its license at https://huggingface.co/{name}, and set HF_TOKEN in the environment or in .env",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{name} has no revision {revision!r}",
            code="E2073",
            field="model.revision",
            help="name a branch, a tag or a commit",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"neither a directory here nor a public model on the hub: {name!r}{did_you_mean(name, known)}",
            code="E2074",
            help="check the name; for a private model set HF_TOKEN in the environment or in .env",
        ) from None
    except errors.HFValidationError:
        raise ModelError(f"{name!r} is not a hub id", code="E2075", help="write it as owner/name") from None
    except errors.SafetensorsParsingError:
        raise ModelError(
            f"a weight file of {name} on the hub has a damaged header", code="E2076", help="pin another model.revision"
        ) from None
    except (http_error, OSError) as error:
        raise MachineError(
            f"the Hugging Face hub cannot be reached for {name}: {env.first_line(error, 160)}",
            code="E2077",
            help=f"check the network; {_OFFLINE_HELP.format(name)}",
        ) from None
    except ValueError:
        raise ModelError(
            f"a file of {name} on the hub is not valid JSON", code="E2078", help="pin another model.revision"
        ) from None
