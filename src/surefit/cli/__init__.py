"""The command line: verbs (app), what they do in order (stages), how it looks (render)."""
