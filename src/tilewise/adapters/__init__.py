"""Calls in other libraries' conventions, translated into calls of tilewise."""
