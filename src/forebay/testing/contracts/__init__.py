"""One conformance suite per Protocol, as pytest-style classes: inherit one and give it the thing to test."""
