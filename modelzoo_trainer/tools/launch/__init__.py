"""Job files for launchers, and the worker for Ray Train."""

from modelzoo_trainer.tools.launch.ray_worker import WorkerStopped, worker

__all__ = ["WorkerStopped", "worker"]
