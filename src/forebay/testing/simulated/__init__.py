"""What takes the place of the machine in a test: disk, clock, blobs and metadata in memory, their faults and crashes.

Knows the seams and nothing of what is promised: `checks` judges what was done with these.
"""
