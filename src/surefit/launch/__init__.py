"""How the processes of a run are started: on this machine, and by SLURM."""
