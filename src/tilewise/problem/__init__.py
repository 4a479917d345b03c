"""What is asked: one call's shapes, mask and options, as plain data and arithmetic."""
