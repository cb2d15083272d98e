"""`forebay produce`: lines, JSON lines or files into a topic."""
