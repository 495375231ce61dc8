"""The linter for training runs: rules and findings (rule), the engine that runs them (engine), all rules (rules/)."""
