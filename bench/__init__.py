"""Forebay beside its peers: `python -m bench` measures, checks what it wrote, and keeps the results."""
