"""Topics as tables: each command of it has a module of its own."""
