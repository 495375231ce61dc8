"""PAR: many processes, many GPUs, many machines."""
