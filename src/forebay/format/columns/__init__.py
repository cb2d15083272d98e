"""Records by column: the buffers that the payload of a data frame has, in Arrow's layout.

Knows no frames: encoding, finding, joining and measuring columns.
"""
