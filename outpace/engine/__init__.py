"""The visible loop: schedule, speculate, run the target once, verify, commit, stream."""
