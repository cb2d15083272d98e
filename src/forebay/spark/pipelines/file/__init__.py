"""A pipeline as its file says it: the words of the YAML, what they declare, and whether the parts fit together."""
