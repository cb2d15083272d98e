"""The whole suite; the first directory under here is the area a test belongs to."""
