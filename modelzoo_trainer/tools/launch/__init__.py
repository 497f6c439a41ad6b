"""Job files for launchers, and what a run reports to them."""
