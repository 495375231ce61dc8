"""Where the numbers of a run go: metrics.jsonl (jsonl), and from there to trackers (sinks, and a file for each)."""
