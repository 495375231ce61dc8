"""The destinations of a run's numbers: metrics.jsonl (jsonl), and from there the trackers (sinks, and a file for
each)."""
