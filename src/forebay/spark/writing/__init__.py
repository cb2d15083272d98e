"""From rows to a topic: segments that tasks stage, and the bulk load that brings all of them in."""
