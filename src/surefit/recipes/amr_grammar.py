"""Grammar of single-line PENMAN for constrained decoding, in xgrammar's EBNF.

Words are letters of the Latin script including all Vietnamese ones, composed or not, so that tokens of half a character
lead nowhere else. A context-free grammar cannot express that no two nodes share a variable: answers are parsed again
after they were generated.
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
"""`node`: a graph. A variable that is mentioned again is a `constant` in this grammar."""
SKELETON_RULES = """
bare ::= "(" concept bare_branch* ")"
bare_branch ::= " " role " " (bare | string | constant)
"""
"""`bare`: a graph without variables; needs `GRAPH_RULES` beside it."""
