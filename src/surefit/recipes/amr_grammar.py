"""PENMAN on one line as a grammar for constrained decoding, in the EBNF of xgrammar.

Words are letters of the Latin script with every Vietnamese one, composed or not, so that tokens which are half a
character lead nowhere else. What a grammar without memory cannot say is that no two nodes share a variable: answers are
read again after they were generated.
"""

_LETTER = r"A-Za-zÀ-ÖØ-öø-ɏ\u1e00-\u1eff\u0300-\u036f"

_COMMON = rf"""
role ::= ":" [A-Za-z] [A-Za-z0-9-]*
concept ::= [{_LETTER}0-9] [{_LETTER}0-9_.%*+'-]*
constant ::= [-+] | [{_LETTER}0-9] [{_LETTER}0-9_.,%*+'-]* | [-+] [0-9] [0-9.,]*
string ::= "\"" [{_LETTER}0-9 _.,;:!?%*+&@#/()'-]+ "\""
"""
GRAPH_RULES = (
    rf"""
node ::= "(" variable " / " concept branch* ")"
branch ::= " " role " " (node | string | constant)
variable ::= [{_LETTER}] [{_LETTER}0-9_]*
"""
    + _COMMON
)
"""`node`: a graph. A variable that is mentioned again is a `constant` here."""
SKELETON_RULES = """
bare ::= "(" concept bare_branch* ")"
bare_branch ::= " " role " " (bare | string | constant)
"""
"""`bare`: a graph without variables; needs `GRAPH_RULES` beside it."""
