"""What tests of several areas share: soak runs, waiting, child processes, servers, places to run in."""
