"""Errors of other programs are found by their text."""

from __future__ import annotations

from collections import Counter

import pytest

from surefit.facts.error_texts import KnownError, find_known_errors, known_errors
from surefit.lint.engine import all_rules

RULES = {rule.code for rule in all_rules()}


@pytest.mark.parametrize("error", known_errors(), ids=lambda error: error.id)
def test_an_example_is_found_as_its_own_entry_alone(error: KnownError) -> None:
    assert [place.error.id for place in find_known_errors(error.example)] == [error.id]
    wrapped = error.example.replace(" ", "\n    ")
    assert [place.error.id for place in find_known_errors(wrapped)] == [error.id]
    assert error.rule is None or error.rule in RULES
    assert error.cause.endswith(".")
    assert error.fix
    assert all(step.endswith((".", "`", ")")) for step in error.fix)


def test_there_are_sixty_and_no_name_stands_twice() -> None:
    assert len(known_errors()) >= 60
    assert max(Counter(error.id for error in known_errors()).values()) == 1
    assert max(Counter(text for error in known_errors() for text in error.text).values()) == 1


def test_a_log_names_each_error_once_with_its_first_line() -> None:
    log = (
        "step 1\nstep 2\nRuntimeError: CUDA error: device-side\n assert triggered\n"
        + 3 * "OSError: [Errno 28] No space left on device\n"
    )
    assert [(place.error.id, place.line, place.times) for place in find_known_errors(log)] == [
        ("device-side-assert", 3, 1),
        ("disk-full", 5, 3),
    ]


@pytest.mark.parametrize("part", ["expandable_segments", "Fix your GPU", "nccl", "", "all is well, loss 0.7"])
def test_the_beginning_of_a_message_is_enough_and_other_text_is_not(part: str) -> None:
    found = [place.error.id for place in find_known_errors(part)]
    assert found == (["cuda-fragmentation"] if part == "expandable_segments" else [])


def test_a_long_log_without_spaces_is_read_in_time() -> None:
    assert find_known_errors("x" * 2_000_000 + " 401 Client Error: Unauthorized")[0].error.id == "unauthorized"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '2e-04'}", ["loss-nan"]),
        ("{'loss': '0', 'entropy': '1.1', 'grad_norm': '0', 'learning_rate': '2e-04'}", ["loss-zero"]),
        ('"grad_norm": 0.0,\n "learning_rate": 0.1,\n "loss": 0.0,', ["loss-zero"]),
        ("{'loss': 0.0, 'grad_norm': 0.31, 'reward': 0.2}", []),
        (
            "401 Client Error. Repository Not Found for url: https://huggingface.co/api/models/x",
            ["not-a-model-identifier"],
        ),
        ("torch._inductor.exc.InductorError: CppCompileError", ["compile-failed"]),
        (
            "MISSING: those params were newly initialized because missing from the checkpoint.",
            ["weights-newly-initialized"],
        ),
        ("Calling `cuda()` is not supported for `8-bit` quantized models", ["to-on-quantized"]),
        ("`.half()` is not supported for quantized model", ["to-on-quantized"]),
        ("failed (exitcode: -9) local_rank: 0", ["killed-by-the-kernel"]),
        ("httpx.ConnectError: [Errno -3] Temporary failure in name resolution", ["offline"]),
        ("Detected 1 oom-kill event(s) in StepId=1.batch", ["slurm-out-of-memory"]),
        ("TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'x'", ["unexpected-argument"]),
        ("TypeError: MyDataset.__init__() got an unexpected keyword argument 'x'", []),
    ],
)
def test_what_installed_releases_print_is_found(text: str, ids: list[str]) -> None:
    assert [place.error.id for place in find_known_errors(text)] == ids


def test_a_rule_is_named_only_where_a_check_can_see_the_cause() -> None:
    unseen = {"file-missing-in-repository", "undefined-symbol", "no-driver", "unauthorized"}
    assert not [error.id for error in known_errors() if error.id in unseen and error.rule]
