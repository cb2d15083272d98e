"""The HTTP server: topics for many clients at once, in one process and one event loop.

Knows HTTP and the service behind it; knows nothing of how records are stored.
"""
