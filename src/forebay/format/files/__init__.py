"""What local files begin with, or are, where they are not frames: segment headers, checkpoints, the live file."""
