"""Several nodes under Ray Train: python ray_train.py on a machine of the cluster.

From elsewhere: ray job submit --working-dir . -- python ray_train.py
Workers that fail are started again, and resume. Exit code 143: a stop file or max_time has stopped
the run; the same command resumes it.
"""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from modelzoo_trainer.cli.ray_worker import worker

trainer = TorchTrainer(
    worker(
        "params.yaml",
        "--device=gpu",
        "--model_dir=/runs/train",
    ),
    torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl"),
    scaling_config=ScalingConfig(
        num_workers=32,  # (2, 8): from 2 to 8, as nodes come and go
        use_gpu=True,
        resources_per_worker={"CPU": 8, "GPU": 1},
    ),
    run_config=RunConfig(
        name="train",
        storage_path="/runs/train-ray",  # on a disk that all nodes see
        failure_config=FailureConfig(max_failures=3),
    ),
)
result = trainer.fit()
raise SystemExit(result.return_value)
