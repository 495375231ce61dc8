"""Doctor: the environment as facts, each with a verdict and what to do (probes)."""
