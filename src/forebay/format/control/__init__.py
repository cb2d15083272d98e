"""Control frames, and the sets of offsets that they name: what a log says about itself between the records."""
