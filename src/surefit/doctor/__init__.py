"""`surefit doctor`: facts about the environment, each with a verdict and a fix (probes)."""
