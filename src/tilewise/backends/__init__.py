"""The host side of each way to compute attention, one module each."""
