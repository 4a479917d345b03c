"""What the call runs on and what it costs: plain data and arithmetic."""
