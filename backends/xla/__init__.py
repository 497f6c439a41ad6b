"""XLA devices, through torch_xla: TPUs, and whatever else has a PJRT plug-in."""
