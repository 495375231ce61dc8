"""A model's tokenizer without transformers, for `surefit audit` and `check --show` where only the core is
installed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.core.errors import MachineError, ModelError
from surefit.core.packaging import install_extra
from surefit.data.rows.sample_checks import load_tokenizer_file
from surefit.facts.chat_template import bake_template_defaults, load_chat_templates, require_tokens
from surefit.facts.gguf import read_gguf
from surefit.facts.hub import hub_errors
from surefit.facts.model import catalogue, model_facts
from surefit.facts.named_templates import template_for, templates_in, to_chat_template_attribute, to_template_dict
from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.tokenizer import (
    TokenizerFacts,
    gguf_tokenizer_facts,
    require_quick_template,
    tokenizer_facts,
)

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*config.json", "chat_template*", "*.jinja")
"""Files of a hub model that its tokenizer is made from."""


class LightTokenizer:
    """The methods of a transformers tokenizer that tokenize, render and decode rows, from tokenizer.json alone.

    Args:
        library: the loaded tokenizer.json, or the vocabulary of a GGUF file; it may be changed.
        facts: special tokens and their ids.
        name: the model's name or path, for messages.

    Attributes:
        chat_template: one text, or several by name; None without any.
    """

    def __init__(self, library: Tokenizer, facts: TokenizerFacts, name: str) -> None:
        self.backend_tokenizer, self.name_or_path = library, name
        self.bos_token, self.eos_token, self.pad_token = facts.bos_token, facts.eos_token, facts.pad_token
        self.bos_token_id, self.eos_token_id = facts.bos_id, facts.eos_id
        self.chat_template: str | dict[str, str] | None = None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, texts: str | Sequence[str], **options: Any) -> dict[str, Any]:
        """Return the ids of one text or of several, without special tokens."""
        several = [texts] if isinstance(texts, str) else list(texts)
        encoded = self.backend_tokenizer.encode_batch_fast(several, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        return {name: text for name, text in tokens.items() if text is not None}

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def apply_chat_template(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **switches: Any,
    ) -> list[str]:
        """Render conversations to text.

        Raises:
            ValueError: the template cannot render one, with its reason.
        """
        template = template_for(self.chat_template, tools)
        if template is None:
            raise ValueError("the tokenizer has no default chat template")
        try:
            return [
                render_chat_template(
                    template,
                    messages,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    special=self.special_tokens_map,
                    switches=switches,
                )
                for messages in conversations
            ]
        except TemplateRefused as error:
            raise ValueError(str(error)) from error


def load_light_tokenizer(section: ModelSection) -> LightTokenizer:
    """Return the model's tokenizer, with the tokens that the config adds, as `model.tokenizer.load_tokenizer` does.

    Raises:
        ModelError: there is no such model, its tokenizer is damaged or has no tokenizer.json. MachineError: the hub
            cannot be reached.
    """
    from tokenizers import AddedToken

    facts, templates = _tokenizer_files(section)
    library = load_tokenizer_file(facts.file) if facts.file is not None else None
    if library is None:
        raise ModelError(
            "there is no usable tokenizer.json, and other tokenizers are read by transformers",
            code="E4190",
            path=section.name_or_path,
            field="model.name_or_path",
            help=install_extra("train"),
        )
    tokenizer = LightTokenizer(copy.deepcopy(library), facts, section.name_or_path)
    vocabulary = tokenizer.get_vocab()
    new = [token for token in section.add_tokens if token not in vocabulary]
    tokenizer.backend_tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    if section.chat_template is not None:
        require_tokens(section.chat_template, tokenizer.get_vocab(), tokenizer.eos_token)
        templates = load_chat_templates(section.chat_template)
    if templates:
        switches = section.chat_template_kwargs
        baked = {name: bake_template_defaults(text, switches) for name, text in templates.items()}
        tokenizer.chat_template = to_chat_template_attribute(baked)
        require_quick_template(tokenizer.chat_template, section.name_or_path)
    return tokenizer


def _tokenizer_files(section: ModelSection) -> tuple[TokenizerFacts, dict[str, str]]:
    """Return the tokenizer's facts and its own chat templates, by name."""
    model = model_facts(section.name_or_path, section.revision)
    if model.gguf is not None:
        facts = gguf_tokenizer_facts(read_gguf(model.gguf))
        return facts, to_template_dict(facts.chat_template)
    directory = model.path or _download_tokenizer(section)
    return tokenizer_facts(directory), templates_in(directory)


def _download_tokenizer(section: ModelSection) -> Path:
    """Fetch a hub model's tokenizer files into the Hugging Face cache, and return the directory there."""
    name = section.name_or_path
    if env.offline():
        raise MachineError(
            f"the tokenizer of {name} is not on this machine, and offline mode is on",
            code="E4191",
            help=f"download it first (`hf download {name}`), or unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE",
        )
    from huggingface_hub import snapshot_download

    with hub_errors(name, section.revision, list(catalogue())):
        return Path(
            snapshot_download(name, revision=section.revision, allow_patterns=list(FILES), token=env.hub_token())
        )
