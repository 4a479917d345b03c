"""The lab: count what attention moves, watch it step by step, break it on purpose, measure it against the model."""
