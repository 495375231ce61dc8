"""Data sets on the Hugging Face hub, read through `datasets`, with its exceptions translated into SureFit's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefit.core import env
from surefit.core.errors import DataError, MachineError, SureFitError
from surefit.core.packaging import require_import
from surefit.core.reading import reason_of
from surefit.data.read.columnar import without_filled_nulls
from surefit.data.read.readers import RowWithPlace


def hub_rows(source: str) -> Iterator[RowWithPlace]:
    """Yield the rows of one split one by one: `datasets` keeps the table on disk.

    Args:
        source: owner/name@split, with an optional :config; `datasets`' slices such as train[:1000] work too.

    Raises:
        DataError: there is no such data set, configuration or split, it is gated, or it cannot be read.
        MachineError: the hub cannot be reached and nothing is cached.
    """
    repository, _, split = source.partition("@")
    name, _, config = repository.partition(":")
    require_import("datasets", source)
    import datasets

    with _hub_errors(repository, split):
        table = datasets.load_dataset(name, config or None, split=split, token=env.hub_token())
        if not len(table):
            raise DataError(
                f"the split {split!r} has no rows",
                code="E4038",
                path=source,
                field="data.split",
                help="choose another split",
            )
        for number, row in enumerate(table, start=1):
            yield RowWithPlace(without_filled_nulls(row), f"{source} row {number}", None)


@contextmanager
def _hub_errors(source: str, split: str) -> Iterator[None]:
    """Translate the exceptions of `datasets` into SureFit's; their class and text tell them apart."""
    try:
        yield
    except Exception as error:
        from datasets.exceptions import DatasetNotFoundError, DatasetsError

        reason = env.first_line(error)
        if isinstance(error, DatasetNotFoundError):
            raise _not_found(source, reason) from None
        if isinstance(error, ConnectionError) or type(error).__module__.startswith(("httpx", "huggingface_hub")):
            raise MachineError(
                f"the hub cannot be reached for {source}: {reason}", code="E4040", help=_OFFLINE_HELP
            ) from None
        if isinstance(error, ValueError) and "split" in reason.lower():
            raise DataError(
                reason,
                code="E4041",
                path=source,
                field="data.split",
                help=f"choose one of these splits; {split!r} is not among them",
            ) from None
        if isinstance(error, ValueError) and "onfig" in reason:
            help_text = "name one as owner/name:config"
            raise DataError(_one_line(error), code="E4042", path=source, help=help_text) from None
        if isinstance(error, (DatasetsError, RuntimeError, ValueError)):
            help_text = "save the data set as Parquet or JSON Lines and name that file"
            raise DataError(f"datasets cannot read it: {reason}", code="E4043", path=source, help=help_text) from None
        if isinstance(error, OSError):
            raise MachineError(
                f"{source} cannot be fetched: {reason}", code="E4044", help="check the disk and its permissions"
            ) from None
        if isinstance(error, (SureFitError, MemoryError)):
            raise
        help_text = "save the data set as Parquet or JSON Lines and name that file"
        raise DataError(
            f"datasets cannot read it: {reason_of(error)}", code="E4045", path=source, help=help_text
        ) from error


_OFFLINE_HELP = (
    "check the network, unset HF_HUB_OFFLINE, or copy the data set's files to this machine and name them in the config"
)


def _not_found(source: str, reason: str) -> DataError:
    name = source.partition("@")[0].partition(":")[0]
    if "gated" in reason:
        return DataError(
            f"{name} is gated: its owner has to grant you access",
            code="E4046",
            path=source,
            help=f"accept its terms at https://huggingface.co/datasets/{name}, then set HF_TOKEN in the environment "
            "or in .env",
        )
    return DataError(
        "neither a file here nor a data set on the hub that you may read",
        code="E4047",
        path=source,
        help="check the name; for a private data set set HF_TOKEN in the environment or in .env",
    )


def _one_line(error: Exception) -> str:
    return " ".join(env.redact(str(error)).split())[:300]
