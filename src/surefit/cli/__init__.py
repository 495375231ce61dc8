"""The command line: registers the verbs (app), one file each, with what they print; how it looks (render)."""
