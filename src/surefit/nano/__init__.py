"""The embedded base model: a Llama of 1.3 million parameters with its own tokenizer and chat template.

It exists so that everything in SureFit runs offline, on a laptop's processor, in a minute: it answers function calls
for a dozen tools, small sums, short summaries, tiny PENMAN graphs and rankings, all from text that
`scripts/nano/corpus.py` generates. It knows nothing else. README.md beside this file is its model card.
"""

from pathlib import Path

PATH = Path(__file__).parent
"""Directory for `from_pretrained`."""
