"""What judges a run: the promises as functions, the orders and schedules that they are tried in, a server's contract.

Each promise yields a `Violation` that names the invariant; none means that it was kept.
"""
