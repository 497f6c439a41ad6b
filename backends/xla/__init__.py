"""XLA devices, through torch_xla: TPUs and other devices with a PJRT plugin."""
