"""The command line: verbs (app), what they show of a stage (a file each), how it looks (render)."""
