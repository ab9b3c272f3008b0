"""Measuring: workloads, paired runs, load, simulation, reports."""
