"""How to make a run again: the commands, and what must be the same for the same result."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from surefit.report.artefacts import Artefacts
from surefit.report.text import drop_surrogates

INSTALLED = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "accelerate", "numpy")
"""The packages that numbers depend on."""
ORDINARY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-")


@dataclass(frozen=True)
class Reproduction:
    """Commands in order, each with what it is for, and the (what, value) pairs that identify the run's inputs."""

    commands: list[tuple[str, str]]
    identities: list[tuple[str, str]]


def reproduction(found: Artefacts) -> Reproduction:
    """From the records of the run; no command where there is no resolved.yaml to run."""
    return Reproduction(_commands(found), _identities(found))


def _commands(found: Artefacts) -> list[tuple[str, str]]:
    if found.settings is None:
        return []
    output = (found.value("output_dir") or drop_surrogates(str(found.run.path))).rstrip("/")
    run, again = shlex.quote(output), shlex.quote(f"{output}-again")
    resolved = shlex.quote(f"{output}/resolved.yaml")
    commands = [(f"The same training, in {output}-again:", f"surefit run {resolved} --set output_dir={again}")]
    if found.metrics:
        both = f"surefit report {run} {again}\nsurefit compare {run} {again}"
        commands.append(("Both runs on one page, and their answers row by row:", both))
    install = _install(found)
    return [*([("The same packages:", install)] if install else []), *commands]


def _install(found: Artefacts) -> str:
    """pip's command for the versions that ran; a build's own suffix (+cu128) is not on the package index."""
    environment = found.environment
    if environment is None:
        return ""
    versions = {name: environment.packages.get(name, "") for name in INSTALLED}
    pinned = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items() if _plain(version)]
    known = _plain(environment.surefit or "")
    clone = f"# in a clone of SureFit {environment.surefit}:\npip install . " if known else ""
    return f"{clone or 'pip install '}{' '.join(pinned)}".rstrip() if pinned or clone else ""


def _plain(version: str) -> bool:
    """Whether it is a version as they are written: it goes into a command that someone will paste."""
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
