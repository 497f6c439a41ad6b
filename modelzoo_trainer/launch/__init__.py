"""Job files for launchers, and the worker for Ray Train."""
