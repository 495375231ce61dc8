"""The linter for training runs: what a rule is (rule), running them all (engine), the rules by family (rules/)."""
