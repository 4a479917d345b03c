"""Measurements: what is timed, how, and how the results are kept and shown."""
