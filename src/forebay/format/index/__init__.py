"""The index of a sealed segment: where its frames lie, and which records have a key or a tag."""
