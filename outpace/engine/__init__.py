"""The engine's loop: schedule, speculate, run the target once, verify, commit, stream."""
