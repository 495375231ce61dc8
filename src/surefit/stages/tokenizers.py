"""The tokenizer of verbs that train nothing: transformers' where it is installed, else the light one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from surefit.core.packaging import is_installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.config.schema import ModelSection


def load_installed_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with the tokens that the config adds.

    Without transformers it is a `LightTokenizer`, which has the methods that `data.tokens` calls.

    Raises:
        ModelError: there is none, it is damaged, or the hub does not serve it.
    """
    if is_installed("transformers"):
        from surefit.model.tokenizer import load_tokenizer

        return load_tokenizer(section)
    from surefit.data.tokens.light_tokenizer import load_light_tokenizer

    return cast("PreTrainedTokenizerBase", load_light_tokenizer(section))
