"""Checkpoints that are complete or absent (manager): copied before they are written (snapshot), waiting for disk space
(disk_guard), ranked by their metrics (best).
"""
