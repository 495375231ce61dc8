"""Where the numbers of a run go: metrics.jsonl (jsonl)."""
