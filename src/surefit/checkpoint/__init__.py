"""Checkpoints that are complete or not there (manager): copied before they are written (snapshot), waiting for room
where the disk is full (disk_guard), ranked by what was measured (best)."""
