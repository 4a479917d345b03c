"""The device side: programs for GPUs, with no checks, no allocation and no defaults."""
