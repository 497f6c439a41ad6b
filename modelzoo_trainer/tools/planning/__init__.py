"""Plan a run without a device: memory, compute and communication of each process."""
