"""Plan: what a run needs before it is started. `static` is the part that arithmetic knows."""
