"""What PRM800K's judge makes of LaTeX's spaces."""

import pytest

from surefit.metrics.math_equivalence import same_value


@pytest.mark.parametrize(
    ("given", "gold", "equal"),
    [
        ("5\\,000", "5000", False),
        ("5000", "5\\;000", False),
        ("5\\ 000", "5000", False),
        ("5 000", "5000", True),  # a plain space is taken out by MATH's own normalisation, which comes first
        ("5,\\!000", "5000", True),
        ("3\\,\\frac{1}{2}", "7/2", True),
        ("1\\quad 2", "3", False),
    ],
)
def test_commands_that_leave_a_space_make_mixed_numbers(given, gold, equal):
    r"""prm800k makes text of LaTeX with pylatexenc: \, \; \: and \quad are spaces, and 5 000 is read as 5+000."""
    assert same_value(given, gold) is equal
