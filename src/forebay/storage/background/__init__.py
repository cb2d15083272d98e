"""What an open log does by itself: background syncs, sealing, history, limits, clean-up; a worker for each."""
