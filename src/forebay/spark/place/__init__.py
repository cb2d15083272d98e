"""Where topics are: a location, what it leads to once opened, and the addresses of its objects."""
