"""Simulated versions of every seam and the contract suites that they and the real ones pass. Shipped.

Nothing outside of tests imports this room. Time is turned by hand and faults are asked for by name.
"""
