"""The sample sets of `math_reasoning` and `code_generation`, in the layouts of GSM8K and of MBPP.

The word problems are the kind that `surefit/nano` was trained on; those of the evaluation set are held out by the hash
of their text (`corpus.is_held_out`), so it has seen none of them. The programming tasks are new to it: one line of Python
per task, from templates, an evaluation task being a template with a number that no training task has it with.
"""

# ruff: noqa: E501 - programs and their tests, a line each
from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from corpus import is_held_out, task_row
from words import NOUNS

MATH_TRAIN, MATH_EVAL = 1200, 200
CODE_TRAIN, CODE_EVAL = 1200, 100

Template = tuple[str, str, Callable[[Any, int], Any], tuple[Any, ...]]
_NUMBERS = (0, 7, -3)
_LISTS: tuple[list[int], ...] = ([], [4, 1, 3], list(range(40)))
TEMPLATES: tuple[Template, ...] = (
    ("adds {n} to x", "x + {n}", lambda x, n: x + n, _NUMBERS),
    ("takes {n} away from x", "x - {n}", lambda x, n: x - n, _NUMBERS),
    ("multiplies x by {n}", "x * {n}", lambda x, n: x * n, _NUMBERS),
    ("returns the larger of x and {n}", "max(x, {n})", lambda x, n: max(x, n), (0, 90, -3)),
    ("returns the smaller of x and {n}", "min(x, {n})", lambda x, n: min(x, n), (0, 90, -3)),
    ("says if x is more than {n}", "x > {n}", lambda x, n: x > n, (0, 90, -3)),
    ("returns the first {n} items of the list x", "x[:{n}]", lambda x, n: x[:n], _LISTS),
    ("returns the last {n} items of the list x", "x[-{n}:]", lambda x, n: x[-n:], _LISTS),
    ("repeats the text x {n} times", "x * {n}", lambda x, n: x * n, ("", "a")),
)


def _math(count: int, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Question and answer as GSM8K writes them, with its calculator note."""
    rng, seen = Random(seed), set[str]()
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        _, question, worked = (turn["content"] for turn in task_row("arithmetic", rng, held_out))
        if question in seen:
            continue
        seen.add(question)
        step, _, last = worked.partition("\n")
        sides = step.split(" = ")
        answer = f"{sides[0]} = <<{sides[0].replace(' ', '')}={sides[1]}>>{sides[1]}\n{last}"
        rows.append({"question": question, "answer": answer})
    return rows


def _task(rng: Random, held_out: bool) -> dict[str, Any]:
    while True:
        place, n = rng.randrange(len(TEMPLATES)), rng.randint(2, 60)
        if is_held_out([place, n]) == held_out:
            break
    text, body, right, values = TEMPLATES[place]
    name = rng.choice(NOUNS)
    return {
        "text": f"Write a function {name}(x) that {text.format(n=n)}.",
        "code": f"def {name}(x):\n    return {body.format(n=n)}",
        "test_list": [f"assert {name}({value!r}) == {right(value, n)!r}" for value in values],
    }


def _code(count: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    rng, seen = Random(seed), set[str]()
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        row = _task(rng, held_out)
        if row["text"] not in seen:
            seen.add(row["text"])
            rows.append({"task_id": len(rows) + 1, **row})
    return rows


TASKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Write a function running_total(numbers) that returns the list of sums so far.",
        "def running_total(numbers):\n    total, sums = 0, []\n    for number in numbers:\n        total += number\n        sums.append(total)\n    return sums",
        ("assert running_total([]) == []", "assert running_total([3, -1, 4]) == [3, 2, 6]"),
    ),
    (
        "Write a function vowels(text) that counts the vowels a, e, i, o and u in a text, capital ones too.",
        "def vowels(text):\n    return sum(letter in 'aeiou' for letter in text.lower())",
        ("assert vowels('') == 0", "assert vowels('Oak tree') == 4", "assert vowels('rhythm') == 0"),
    ),
    (
        "Write a function is_palindrome(text) that says if a text reads the same backwards, spaces and case ignored.",
        "def is_palindrome(text):\n    letters = text.replace(' ', '').lower()\n    return letters == letters[::-1]",
        (
            "assert is_palindrome('Never odd or even') is True",
            "assert is_palindrome('odd') is False",
            "assert is_palindrome('') is True",
        ),
    ),
    (
        "Write a function second_largest(numbers) that returns the second largest different number, or None.",
        "def second_largest(numbers):\n    found = sorted(set(numbers))\n    return found[-2] if len(found) > 1 else None",
        ("assert second_largest([5, 1, 5, 3]) == 3", "assert second_largest([2, 2]) is None"),
    ),
    (
        "Write a function collatz(n) that returns how many steps n takes to 1: half of an even number, 3n + 1 of an odd one.",
        "def collatz(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        steps += 1\n    return steps",
        ("assert collatz(1) == 0", "assert collatz(6) == 8", "assert collatz(27) == 111"),
    ),
    (
        "Write a function chunks(items, size) that cuts a list into lists of the given size; the last one may be shorter.",
        "def chunks(items, size):\n    return [items[i : i + size] for i in range(0, len(items), size)]",
        ("assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]", "assert chunks([], 3) == []"),
    ),
    (
        "Write a function roman(n) that writes a number from 1 to 3999 in Roman numerals.",
        "def roman(n):\n    text = ''\n    for value, sign in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), 'M CM D CD C XC L XL X IX V IV I'.split()):\n        text += sign * (n // value)\n        n %= value\n    return text",
        ("assert roman(1) == 'I'", "assert roman(1994) == 'MCMXCIV'", "assert roman(3999) == 'MMMCMXCIX'"),
    ),
    (
        "Write a function first_repeated(text) that returns the first letter that has occurred before, or None.",
        "def first_repeated(text):\n    seen = set()\n    for letter in text:\n        if letter in seen:\n            return letter\n        seen.add(letter)\n    return None",
        (
            "assert first_repeated('abca') == 'a'",
            "assert first_repeated('abba') == 'b'",
            "assert first_repeated('abc') is None",
        ),
    ),
    (
        "Write a function transpose(rows) that swaps the rows and the columns of a table given as a list of lists.",
        "def transpose(rows):\n    return [list(column) for column in zip(*rows)]",
        ("assert transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]", "assert transpose([]) == []"),
    ),
    (
        "Write a function word_counts(text) that returns how often each word occurs, as a dictionary.",
        "def word_counts(text):\n    counts = {}\n    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts",
        (
            "assert word_counts('to be or not to be') == {'to': 2, 'be': 2, 'or': 1, 'not': 1}",
            "assert word_counts('') == {}",
        ),
    ),
    (
        "Write a class Counter with a method press() that returns how often it has been pressed.",
        "class Counter:\n    def __init__(self):\n        self.times = 0\n\n    def press(self):\n        self.times += 1\n        return self.times",
        ("one, two = Counter(), Counter()", "assert [one.press(), one.press(), two.press()] == [1, 2, 1]"),
    ),
    (
        "Write a function checked_sqrt(x) that returns the square root, and raises ValueError for a negative number.",
        "def checked_sqrt(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5",
        (
            "assert checked_sqrt(9) == 3",
            "try:\n    checked_sqrt(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('accepted -1')",
        ),
    ),
)


def _tasks() -> list[dict[str, Any]]:
    """A dozen tasks written by hand: too hard for `surefit/nano`, right for trying a real model or the sandbox."""
    return [
        {"task_id": n, "text": text, "code": code, "test_list": list(tests)}
        for n, (text, code, tests) in enumerate(TASKS, 1)
    ]


def sample_sets() -> dict[str, list[dict[str, Any]]]:
    """The five sets by name."""
    return {
        "math-reasoning-train": _math(MATH_TRAIN, 30, held_out=False),
        "math-reasoning-eval": _math(MATH_EVAL, 31, held_out=True),
        "code-generation-train": _code(CODE_TRAIN, 32, held_out=False),
        "code-generation-eval": _code(CODE_EVAL, 33, held_out=True),
        "code-generation-tasks": _tasks(),
    }
