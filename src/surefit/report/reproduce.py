"""Instructions to reproduce a run: the commands, and the inputs that must be the same."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from surefit.report.artefacts import Artefacts
from surefit.report.text import drop_surrogates

INSTALLED = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "accelerate", "numpy")
"""Packages that the numbers depend on."""
ORDINARY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-")


@dataclass(frozen=True)
class Reproduction:
    """Commands in order, each with its purpose, and (name, value) pairs that identify the run's inputs."""

    commands: list[tuple[str, str]]
    identities: list[tuple[str, str]]


def reproduction(found: Artefacts) -> Reproduction:
    """Build the instructions from the run's records; no commands without a resolved.yaml."""
    return Reproduction(_commands(found), _identities(found))


def _commands(found: Artefacts) -> list[tuple[str, str]]:
    if found.settings is None:
        return []
    output = run_path(found)
    run, again = shlex.quote(output), shlex.quote(f"{output}-again")
    resolved = shlex.quote(f"{output}/resolved.yaml")
    commands = [(f"Repeat the training, in {output}-again:", f"surefit run {resolved} --set output_dir={again}")]
    if found.metrics:
        comparison = f"surefit report {run} {again}\nsurefit compare {run} {again}"
        commands.append(("Compare both runs, and their answers row by row:", comparison))
    install = _install(found)
    return [*([("Install the same packages:", install)] if install else []), *commands]


def run_path(found: Artefacts) -> str:
    """Return the run directory as its config names it, for commands in the directory in which the run was started."""
    return (found.value("output_dir") or drop_surrogates(str(found.run.path))).rstrip("/")


def _install(found: Artefacts) -> str:
    """Return pip's command for the versions that ran, without local version suffixes (+cu128), which the package index
    does not have."""
    environment = found.environment
    if environment is None:
        return ""
    versions = {name: environment.packages.get(name, "") for name in INSTALLED}
    pinned = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items() if _plain(version)]
    is_valid = _plain(environment.surefit or "")
    clone = f"# in a clone of SureFit {environment.surefit}:\npip install '.[train]' " if is_valid else ""
    return f"{clone or 'pip install '}{' '.join(pinned)}".rstrip() if pinned or clone else ""


def _plain(version: str) -> bool:
    """Return whether a version has only ordinary characters, since it becomes part of a command that users paste."""
    return bool(version) and set(version) <= ORDINARY


def _identities(found: Artefacts) -> list[tuple[str, str]]:
    certificate, passport = found.certificate, found.passport
    gguf = certificate.base.gguf if certificate else None
    pairs: list[tuple[str, str | None]] = [
        ("Seed", found.value("train.seed")),
        ("Base model, SHA-256", certificate.base.sha256 if certificate else None),
        ("GGUF file of the base", gguf.text if gguf else None),
        ("GGUF file, SHA-256", gguf.sha256 if gguf else None),
        ("Base model, revision", found.value("model.revision")),
        ("Training files, SHA-256", passport.sha256 if passport else None),
        ("Adapter, SHA-256", certificate.adapter_sha256 if certificate else None),
        ("Merged model, SHA-256", certificate.merged_sha256 if certificate else None),
    ]
    return [(name, text) for name, text in pairs if text]
