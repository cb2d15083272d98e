"""Topics as they are at one moment: what each partition holds, where it lies, and what of it ended."""
