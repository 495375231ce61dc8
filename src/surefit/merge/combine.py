"""Several adapters of one base become one, by PEFT's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surefit.core.errors import ConfigError, GateError
from surefit.merge.adapter_file import read_adapter
from surefit.merge.stream import misfits
from surefit.model.adapter import factors_in_compute_dtype
from surefit.model.streamed import FromFiles

WAYS = ("cat", "linear", "ties", "dare_ties", "dare_linear", "magnitude_prune", "svd")
"""`combination_type` of PEFT's add_weighted_adapter. cat is the exact weighted sum of the updates; ties (Yadav et al.
2023) and dare (Yu et al. 2024) leave out what is small or at odds, and need adapters of one rank."""
DENSITY = 0.5
"""The share of each adapter that ties, dare and magnitude_prune keep."""


def combine(
    streamed: FromFiles, adapters: Sequence[tuple[Path, float]], way: str, directory: Path, density: float = DENSITY
) -> Path:
    """Write the combination of adapters as one; returns its directory.

    Args:
        streamed: their base; afterwards it carries adapters and is not to be used again.
        adapters: (directory, weight), at least two.
        way: one of `WAYS`.
        directory: an empty folder.

    Raises:
        GateError: an adapter that does not fit the base, or has factors beside experts.
        ConfigError: PEFT does not combine these adapters in this way.
    """
    for path, _ in adapters:
        adapter = read_adapter(path)
        if adapter.wrapped:
            raise GateError(
                "it has factors for experts, which PEFT has not been proved to combine",
                code="E6004",
                path=path,
                help="combine adapters of linear layers, or merge one after the other",
            )
        if problems := misfits(adapter, streamed.model):
            raise GateError(
                f"the adapter does not fit the base: {problems[0]}",
                code="E6005",
                path=path,
                help="combine adapters of one base",
            )
    names = [f"adapter{number}" for number in range(len(adapters))]
    model: Any = streamed.with_adapter(adapters[0][0], name=names[0])
    for name, (path, _) in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(str(path), adapter_name=name, autocast_adapter_dtype=False)
    factors_in_compute_dtype(model)
    options = {} if way in ("cat", "linear", "svd") else {"density": density}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # dare drops at random: the same adapters shall give the same model
            model.add_weighted_adapter(
                names, [weight for _, weight in adapters], "combined", combination_type=way, **options
            )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"PEFT does not combine these adapters by {way}: {error}",
            code="E6006",
            field="--combine",
            help=f"adapters of different ranks can be summed by cat; the ways are {', '.join(WAYS)}",
        ) from error
    # What PEFT would save of the embeddings beside their factors is the base's own; to decide it, it would ask the hub.
    model.save_pretrained(directory, selected_adapters=["combined"], save_embedding_layers=False)
    return directory / "combined"
