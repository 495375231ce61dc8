"""The config: its shape (schema), its file (load), its automatic values (resolve), its starter (starter)."""
