"""SEC: secrets, which should not be in a config."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.resolve import iter_config_values
from surefit.config.schema import SureFitConfig
from surefit.core.env import redact
from surefit.core.units import truncate_text
from surefit.lint.rule import Finding, rule


@rule("SEC001", "secret-in-config", severity="error")
def secret_in_config(config: SureFitConfig) -> Iterator[Finding]:
    """A value in the config looks like an access key.

    ## What it does
    Compares every text in the config with the shapes of keys of the Hugging Face hub, OpenAI, GitHub, AWS and others,
    and with the tokens in the environment; looks for passwords in URLs (`https://user:password@host`, `?api_key=…`) and
    after names (`WANDB_API_KEY=…`). The value itself is never printed.

    ## Why it is bad
    Configs are committed, copied into run directories and reports, and sent to colleagues. A key in them is public.

    ## Example
    `data.train: https://user:hf_…@huggingface.co/datasets/owner/name`.

    ## Fix
    Revoke the key, create a new one, and put that into the environment or a `.env` file: `HF_TOKEN=…`.

    ## Evidence
    Meli et al. 2019 ("How Bad Can It Git?"): over 100,000 public repositories hold secrets, and thousands of new ones
    are added every day.
    """
    for dotted, value in iter_config_values(config):
        texts = value if isinstance(value, list) else [value]
        secret = next((text for text in texts if isinstance(text, str) and redact(text) != text), None)
        if secret is not None:
            yield Finding(
                field=dotted,
                message=f"holds what looks like an access key or a password: {truncate_text(redact(secret))}",
                help="revoke it, and put a new one into the environment or a .env file",
            )
