"""The costs of steps and drafts on this machine: the curves, their calibration and their file."""
