"""Measuring whether speculation pays: workloads, paired runs, statistics, reports. Uses the engine's public doors."""
