"""Audit of pairs of answers: what they have in common, whether they contradict each other, and how much length says.

Needs neither a tokenizer nor numpy, so that a check's sample and the audit of all rows count alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from surefit.data.audit.sample import DetectorTally
from surefit.data.rows.pairs import scores_of
from surefit.task import Example, Message

if TYPE_CHECKING:
    from surefit.data.rows.layouts import Examples
    from surefit.facts.audit import Observation

IDENTICAL, NEAR, SWAPPED, TRUNCATED = "pair_identical", "pair_near_identical", "pair_swapped", "pair_equal_truncated"
"""Observations of one pair: equal answers, nearly equal ones, scores that say the opposite, and answers that are equal
up to `data.max_length`."""
CONTRADICTION, LONGER, SAME_PROMPT = "pair_contradiction", "pair_longer", "pair_same_prompt"
"""Observations of all pairs together: the reverse of an earlier pair, a longer chosen answer, an earlier pair's
prompt."""
ALIKE = 0.95
"""Share of the words that two answers have in common, in one order, from which they are nearly identical."""
WORDS = 2_000
"""Words of an answer that are compared."""
Z = NormalDist().inv_cdf(0.975)
"""Standard errors on either side in a 95 % interval."""


class PairFacts(NamedTuple):
    """Hashes of a pair's prompt and answers, and the characters of both answers."""

    prompt: bytes
    chosen: bytes
    rejected: bytes
    chosen_length: int
    rejected_length: int


@dataclass(frozen=True)
class LengthBias:
    """How well length alone tells the chosen from the rejected answers, with 95 % intervals.

    Attributes:
        longer: pairs whose chosen answer is longer.
        unequal: pairs whose answers differ in length.
        share: `longer / unequal`, with Wilson's interval.
        auc: probability that a chosen answer is longer than the rejected answer of any pair; equal lengths count half.
            Its interval treats a pair as one draw (Obuchowski 1997), since both answers have one prompt.
    """

    longer: int
    unequal: int
    share: tuple[float, float, float]
    auc: tuple[float, float, float]


def pair_facts(example: Example) -> PairFacts:
    """Return what is compared between pairs."""
    assert example.rejected is not None
    chosen, rejected = example.messages[-1], example.rejected[-1]
    return PairFacts(
        prompt_hash(example),
        answer_hash(chosen),
        answer_hash(rejected),
        len(turn_content(chosen)),
        len(turn_content(rejected)),
    )


def find_alike_answers(example: Example) -> list[tuple[str, str]]:
    """Return whether the answers of a pair are identical or nearly so, as (observation, description); at most one."""
    assert example.rejected is not None
    chosen, rejected = example.messages[-1], example.rejected[-1]
    if _answer(chosen) == _answer(rejected):
        return [(IDENTICAL, f"both answers are {turn_content(chosen)[:60]!r}")]
    if chosen.get("tool_calls") != rejected.get("tool_calls"):
        return []
    similarity = word_similarity(turn_content(chosen), turn_content(rejected))
    return [(NEAR, f"the answers have {similarity:.0%} of their words in common")] if similarity >= ALIKE else []


def word_similarity(one: str, other: str) -> float:
    """Return the share of the words of two texts that they have in common, in one order; 0 where it is below `ALIKE`.

    Case and punctuation do not count. With m words in common and n words in all, it is 2m / n.
    """
    a, b = (re.findall(r"\w+", text.casefold())[:WORDS] for text in (one, other))
    if not a or not b:
        return 0.0
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.real_quick_ratio() < ALIKE or matcher.quick_ratio() < ALIKE:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= ALIKE else 0.0


def find_swapped_scores(row: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return whether the scores of a row say that the rejected answer is the better one.

    Args:
        names: `data.columns`; where it swaps the two answers, the scores are swapped with them.
    """
    scores = scores_of(row)
    if scores is None:
        return []
    better, chosen, worse, rejected = scores
    if (names.get("chosen"), names.get("rejected")) == ("rejected", "chosen"):
        better, chosen, worse, rejected = worse, rejected, better, chosen
    if chosen >= rejected:
        return []
    return [(SWAPPED, f"{better} is {chosen:g}, {worse} is {rejected:g}")]


def length_bias(lengths: Sequence[tuple[int, int]]) -> LengthBias:
    """Return how well length alone tells the answers of pairs apart.

    Args:
        lengths: (length of the chosen answer, length of the rejected one) of each pair; at least one.
    """
    count = len(lengths)
    longer, unequal = sum(c > r for c, r in lengths), sum(c != r for c, r in lengths)
    chosen, rejected = sorted(c for c, _ in lengths), sorted(r for _, r in lengths)
    # Each answer against all answers of the other side: the share that it is longer than, ties counting half.
    above = [(bisect_left(rejected, c) + bisect_right(rejected, c)) / (2 * count) for c, _ in lengths]
    below = [1 - (bisect_left(chosen, r) + bisect_right(chosen, r)) / (2 * count) for _, r in lengths]
    auc = math.fsum(above) / count
    squares = math.fsum((a + b - 2 * auc) ** 2 for a, b in zip(above, below, strict=True))
    half = Z * math.sqrt(squares / (count * (count - 1))) if count > 1 else 1.0
    interval = max(0.0, auc - half), min(1.0, auc + half)
    return LengthBias(longer, unequal, _share(longer, unequal), (auc, *interval))


def _share(part: int, whole: int) -> tuple[float, float, float]:
    """Return a share with Wilson's interval; of nothing, ½ with the whole interval."""
    if not whole:
        return 0.5, 0.0, 1.0
    share = part / whole
    centre = (share + Z * Z / (2 * whole)) / (1 + Z * Z / whole)
    half = Z / (1 + Z * Z / whole) * math.sqrt(share * (1 - share) / whole + Z * Z / (4 * whole * whole))
    return share, max(0.0, centre - half), min(1.0, centre + half)


def observe_all_pairs(pairs: Sequence[tuple[int, PairFacts]], where: Callable[[int], str]) -> dict[str, Observation]:
    """Return the observations of all pairs together.

    Args:
        pairs: number of the row and facts of each pair, in order.
        where: number of a row → its place.
    """
    if not pairs:
        return {}
    tally = DetectorTally()
    seen: dict[tuple[bytes, bytes, bytes], int] = {}
    prompts: dict[bytes, int] = {}
    for index, pair in pairs:
        reverse = seen.get((pair.prompt, pair.rejected, pair.chosen))
        if reverse is not None and pair.chosen != pair.rejected:
            tally.add(CONTRADICTION, index, f"prefers the answer that {where(reverse)} rejects")
        if pair.prompt in prompts:
            tally.add(SAME_PROMPT, index, f"the prompt of {where(prompts[pair.prompt])}")
        if pair.chosen_length > pair.rejected_length:
            tally.add(LONGER, index, f"{pair.chosen_length:,} characters against {pair.rejected_length:,}")
        seen.setdefault((pair.prompt, pair.chosen, pair.rejected), index)
        prompts.setdefault(pair.prompt, index)
    bias = length_bias([(pair.chosen_length, pair.rejected_length) for _, pair in pairs])
    most = Counter(pair.prompt for _, pair in pairs).most_common(1)[0][1]
    count = len(pairs)
    return {
        CONTRADICTION: tally.observation(CONTRADICTION, count, where),
        LONGER: tally.observation(LONGER, bias.unequal, where, describe_bias(bias)),
        SAME_PROMPT: tally.observation(
            SAME_PROMPT, count, where, f"{len(prompts):,} different prompts; the most frequent has {most:,} pairs"
        ),
    }


def describe_bias(bias: LengthBias) -> str:
    """Return both measures in words, with their intervals."""
    (share, low, high), (auc, auc_low, auc_high) = bias.share, bias.auc
    return (
        f"the chosen answer is longer in {share:.1%} ({low:.1%} to {high:.1%}) of the pairs that differ in length; AUC "
        f"of length alone {auc:.2f} ({auc_low:.2f} to {auc_high:.2f})"
    )


def observe_pairs(
    examples: Examples, rows: Iterable[Mapping[str, Any]], where: Callable[[int], str], names: Mapping[str, str]
) -> dict[str, Observation]:
    """Return the observations on a sample of pairs; none where no example is one.

    Args:
        examples: the sample.
        rows: the rows of the sample, for their scores.
        where: number of such a row → its place.
        names: `data.columns`.
    """
    pairs = [(n, example) for n, example in enumerate(examples) if example.rejected is not None]
    if not pairs:
        return {}
    tally, scores = DetectorTally(), DetectorTally()
    for number, example in pairs:
        for name, description in find_alike_answers(example):
            tally.add(name, number, description)
    for number, row in enumerate(rows):
        for name, description in find_swapped_scores(row, names):
            scores.add(name, number, description)
    place = examples.where.__getitem__
    return {
        **{name: tally.observation(name, len(pairs), place) for name in (IDENTICAL, NEAR)},
        SWAPPED: scores.observation(SWAPPED, len(pairs), where),
        **observe_all_pairs([(number, pair_facts(example)) for number, example in pairs], place),
    }


def prompt_hash(example: Example) -> bytes:
    """Return the hash of an example's prompt: system message, turns and tools."""
    return _hash([example.prompt, example.tools])


def answer_hash(turn: Message) -> bytes:
    """Return the hash of an answer: its text without white space at its ends, its calls and its reasoning."""
    return _hash(_answer(turn))


def turn_content(turn: Message) -> str:
    """Return an answer's text without white space at its ends."""
    return str(turn.get("content") or "").strip()


def _answer(turn: Message) -> list[Any]:
    others = {key: value for key, value in turn.items() if key not in ("role", "content", "weight")}
    return [turn_content(turn), others]


def _hash(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
