"""Training: one step (step), the loop around it (loop), and what both are made of (loss, optim, order)."""
