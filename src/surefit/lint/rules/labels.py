"""LAB: which tokens the loss falls on."""
