"""Several processes, one optimizer step: who they are (mesh), and how each way of sharing carries it out (engine)."""
