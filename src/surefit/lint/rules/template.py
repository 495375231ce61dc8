"""TPL: the tokenizer and its chat template."""
