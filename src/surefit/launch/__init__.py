"""Starting the processes of a run: on this machine, on a Ray cluster, and by SLURM."""
