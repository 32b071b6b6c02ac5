"""The machines we compile for: one package each, found by entry point, imported by nobody."""
