"""Frames, the unit of writing and of checking: one batch with its header and checksum.

Knows columns; knows neither what control frames say nor which file a frame stands in.
"""
