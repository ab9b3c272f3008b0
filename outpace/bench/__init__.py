"""Measures whether speculation pays: workloads, paired runs, simulation, reports. Uses the engine's public API."""
