"""The older layout to today's, with the places of its values."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
from modelzoo_trainer.config.legacy import keys as legacy_keys
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import (
    FilePosition,
    Mapping,
    Place,
    Problems,
    Scalar,
    Sequence,
    to_plain,
)
from modelzoo_trainer.config.sections import INIT_KEYS
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import SCHEDULERS

FULL = """\
train_input:
  data_processor: DigitsProcessor
  batch_size: 16
  micro_batch_size: 4
eval_input:
  data_processor: DigitsProcessor
  split: val
  batch_size: 32
  micro_batch_size: {explore: {min: 2}}
model:
  name: fc_mnist
  mixed_precision: true
  fp16_type: bfloat16
  hidden_sizes: [32, 16]
  activation_fn: relu
  lora_params: {r: 4}
  compression: {format: int8, param_filter: "*"}
  selective_grad: {param_filter: "fc*"}
optimizer:
  optimizer_type: AdamW
  beta1: 0.9
  beta2: 0.95
  weight_decay_rate: 0.1
  learning_rate:
    - {scheduler: Linear, initial_learning_rate: 0.0, end_learning_rate: 0.01, steps: 5}
    - {scheduler: CosineDecay, initial_learning_rate: 0.01, end_learning_rate: 0.0, decay_steps: 20}
  loss_scaling_factor: dynamic
  max_gradient_norm: 1.0
  log_summaries: true
  grad_accum_steps: 2
sparsity: {algorithm: static, sparsity: 0.5, add_summaries: true}
runconfig:
  target_device: CPU
  mode: train
  num_csx: 2
  num_wgt_servers: 8
  model_dir: out
  seed: 7
  precision_opt_level: 1
  max_steps: 40
  eval_frequency: 20
  eval_steps: 3
  checkpoint_steps: 10
  save_initial_checkpoint: false
  checkpoint_path: start.ckpt
  max_checkpoints: 2
  load_checkpoint_states: model
  log_steps: 5
  logging: DEBUG
  ini: {ws_rt: 1}
  act_memory_gi: 9
  transfer_processes: 3
  check_loss_values: false
  log_input_summaries: true
  dump_activations: false
  op_profiler_config: {start_step: 1, end_step: 2}
  hf_cache_dir: /cache
  summary_dir: events
  legacy_event_dirs: true
  experimental:
    listeners:
      - {listener_type: NormTensorListener, listener_name: a, tensor_names: "*"}
      - {listener_type: NormTensorListener, listener_name: b, tensor_names: fc}
wandb: {project: digits, tags: [a, b]}
"""

EVAL = {"data_processor": "DigitsProcessor", "split": "val", "batch_size": 32}
CONVERTED = {
    "trainer": {
        "init": {
            "backend": {
                "backend_type": "CPU",
                "cluster_config": {"num_csx": 2, "max_wgt_servers": 8},
            },
            "model_dir": "out",
            "model": {"name": "fc_mnist", "hidden_sizes": [32, 16], "activation_fn": "relu"},
            "optimizer": {"AdamW": {"betas": [0.9, 0.95], "weight_decay": 0.1}},
            "schedulers": [
                {
                    "SequentialLR": {
                        "schedulers": [
                            {
                                "LinearLR": {
                                    "initial_learning_rate": 0.0,
                                    "end_learning_rate": 0.01,
                                    "total_iters": 5,
                                }
                            },
                            {
                                "CosineDecayLR": {
                                    "initial_learning_rate": 0.01,
                                    "end_learning_rate": 0.0,
                                    "total_iters": 20,
                                }
                            },
                        ]
                    }
                }
            ],
            "precision": {
                "enabled": True,
                "fp16_type": "bfloat16",
                "precision_opt_level": 1,
                "loss_scaling_factor": "dynamic",
                "max_gradient_norm": 1.0,
                "log_loss_scale": True,
            },
            "sparsity": {"algorithm": "static", "sparsity": 0.5},
            "loop": {
                "max_steps": 40,
                "eval_frequency": 20,
                "eval_steps": 3,
                "grad_accum_steps": 2,
            },
            "checkpoint": {"steps": 10, "save_initial_checkpoint": False},
            "logging": {"log_steps": 5, "log_level": "DEBUG"},
            "callbacks": [
                {
                    "GlobalFlags": {
                        "csx.debug.ini": {"ws_rt": 1},
                        "csx.debug.act_memory_gi": 9,
                        "csx.performance.transfer_processes": 3,
                    }
                },
                {"ScopedTrainFlags": {"csx.performance.micro_batch_size": 4}},
                {
                    "ScopedValidateFlags": {
                        "csx.performance.micro_batch_size": {"explore": {"min": 2}}
                    }
                },
                {"Lora": {"lora_params": {"r": 4}}},
                {"LogInputSummaries": {}},
                {"CheckLoss": None},
                {"ComputeNorm": {}},
                {"LoadCheckpointStates": {"load_checkpoint_states": "model"}},
                {"KeepNCheckpoints": {"n": 2}},
                {"LogSparsity": {}},
                {"WeightCompression": {"compressions": {"format": "int8", "param_filter": "*"}}},
                {"SelectiveGrad": {"selective_grads": {"param_filter": "fc*"}}},
                {"OpProfiler": {"start_step": 1, "end_step": 2}},
                {"HFCacheDir": {"cache_dir": "/cache"}},
                {"NormTensorListener": {"listener_name": "a", "tensor_names": "*"}},
                {"NormTensorListener": {"listener_name": "b", "tensor_names": "fc"}},
            ],
            "loggers": [
                {"TensorBoardLogger": {"summary_dir": "events", "legacy_event_dirs": True}},
                {"WandbLogger": {"project": "digits", "tags": ["a", "b"]}},
            ],
            "seed": 7,
        },
        "fit": {
            "train_dataloader": {"data_processor": "DigitsProcessor", "batch_size": 16},
            "val_dataloader": EVAL,
            "ckpt_path": "start.ckpt",
        },
        "validate": {"val_dataloader": EVAL, "ckpt_path": "start.ckpt"},
        "validate_all": {"val_dataloaders": EVAL, "ckpt_paths": "start.ckpt"},
    }
}

DIGITS = """\
train_input: {data_processor: DigitsProcessor, batch_size: 16}
eval_input: {data_processor: DigitsProcessor, split: val, batch_size: 16}
model:
  name: fc_mnist
  mixed_precision: true
  depth: 2
  hidden_size: 8
optimizer:
  optimizer_type: adamw
  beta2: 0.95
  weight_decay_rate: 0.1
  learning_rate:
  - {scheduler: Linear, initial_learning_rate: 0.0, end_learning_rate: 0.01, steps: 5}
  - {scheduler: CosineDecay, initial_learning_rate: 0.01, end_learning_rate: 0.0, decay_steps: 9}
  max_gradient_norm: 1.0
  log_summaries: false
runconfig:
  target_device: CPU
  max_steps: 14
  checkpoint_steps: 7
  check_loss_values: true
  dump_activations: false
  max_checkpoints: 2
  log_steps: 5
  eval_frequency: 7
"""


OURS = ("WarmupStableDecay",)  # younger than that layout
COMPOSED = ("SequentialLR", "ChainedScheduler", "ScalePerParamLR")  # of lists and adjustments

# Each row of the table: where a key was, and where it is below trainer.init.
MOVED = dict(
    line.split()
    for line in """\
runconfig.model_dir model_dir
runconfig.seed seed
runconfig.target_device backend/backend_type
runconfig.compile_dir backend/compile_dir
runconfig.compile_only backend/compile_only
runconfig.validate_only backend/validate_only
runconfig.enable_distributed backend/enable_distributed
runconfig.main_process_id backend/main_process_id
runconfig.dist_backend backend/dist_backend
runconfig.init_method backend/init_method
runconfig.sync_batchnorm backend/sync_batchnorm
runconfig.num_csx backend/cluster_config/num_csx
runconfig.num_wgt_servers backend/cluster_config/max_wgt_servers
runconfig.num_act_servers backend/cluster_config/max_act_per_csx
runconfig.num_workers_per_csx backend/cluster_config/num_workers_per_csx
runconfig.mgmt_address backend/cluster_config/mgmt_address
runconfig.mgmt_namespace backend/cluster_config/mgmt_namespace
runconfig.credentials_path backend/cluster_config/credentials_path
runconfig.mount_dirs backend/cluster_config/mount_dirs
runconfig.python_paths backend/cluster_config/python_paths
runconfig.job_labels backend/cluster_config/job_labels
runconfig.job_priority backend/cluster_config/job_priority
runconfig.job_time_sec backend/cluster_config/job_time_sec
runconfig.disable_version_check backend/cluster_config/disable_version_check
runconfig.precision_opt_level precision/precision_opt_level
runconfig.num_steps loop/num_steps
runconfig.max_steps loop/max_steps
runconfig.num_epochs loop/num_epochs
runconfig.steps_per_epoch loop/steps_per_epoch
runconfig.eval_frequency loop/eval_frequency
runconfig.eval_steps loop/eval_steps
runconfig.checkpoint_steps checkpoint/steps
runconfig.autoload_last_checkpoint checkpoint/autoload_last_checkpoint
runconfig.disable_strict_checkpoint_loading checkpoint/disable_strict_checkpoint_loading
runconfig.save_initial_checkpoint checkpoint/save_initial_checkpoint
runconfig.log_steps logging/log_steps
runconfig.logging logging/log_level
runconfig.wsc_log_level logging/wsc_log_level
runconfig.enable_act_frequency logging/enable_act_frequency
runconfig.transfer_processes callbacks/GlobalFlags/csx.performance.transfer_processes
runconfig.ini callbacks/GlobalFlags/csx.debug.ini
runconfig.debug_args callbacks/GlobalFlags/csx.debug.debug_args
runconfig.retrace_every_iteration callbacks/GlobalFlags/csx.debug.retrace_every_iteration
runconfig.lazy_initialization callbacks/GlobalFlags/csx.debug.lazy_initialization
runconfig.log_initialization callbacks/GlobalFlags/csx.debug.log_initialization
runconfig.drop_data callbacks/GlobalFlags/csx.debug.drop_data
runconfig.fabric_type_blacklist callbacks/GlobalFlags/csx.debug.fabric_type_blacklist
runconfig.compile_crd_memory_gi callbacks/GlobalFlags/csx.debug.compile_crd_memory_gi
runconfig.execute_crd_memory_gi callbacks/GlobalFlags/csx.debug.execute_crd_memory_gi
runconfig.wrk_memory_gi callbacks/GlobalFlags/csx.debug.wrk_memory_gi
runconfig.act_memory_gi callbacks/GlobalFlags/csx.debug.act_memory_gi
runconfig.cmd_memory_gi callbacks/GlobalFlags/csx.debug.cmd_memory_gi
runconfig.wgt_memory_gi callbacks/GlobalFlags/csx.debug.wgt_memory_gi
runconfig.chf_memory_gi callbacks/GlobalFlags/csx.debug.chf_memory_gi
runconfig.debug_args_path callbacks/DebugArgsPath/debug_args_path
runconfig.load_checkpoint_states callbacks/LoadCheckpointStates/load_checkpoint_states
runconfig.max_checkpoints callbacks/KeepNCheckpoints/n
runconfig.op_profiler_config callbacks/OpProfiler
runconfig.hf_cache_dir callbacks/HFCacheDir/cache_dir
runconfig.summary_dir loggers/TensorBoardLogger/summary_dir
runconfig.legacy_event_dirs loggers/TensorBoardLogger/legacy_event_dirs
model.mixed_precision precision/enabled
model.fp16_type precision/fp16_type
model.lora_params callbacks/Lora/lora_params
model.compression callbacks/WeightCompression/compressions
model.selective_grad callbacks/SelectiveGrad/selective_grads
train_input.micro_batch_size callbacks/ScopedTrainFlags/csx.performance.micro_batch_size
eval_input.micro_batch_size callbacks/ScopedValidateFlags/csx.performance.micro_batch_size
wandb.project loggers/WandbLogger/project
wandb.group loggers/WandbLogger/group
wandb.run_id loggers/WandbLogger/run_id
wandb.run_name loggers/WandbLogger/run_name
wandb.job_type loggers/WandbLogger/job_type
wandb.tags loggers/WandbLogger/tags
wandb.resume loggers/WandbLogger/resume
wandb.entity loggers/WandbLogger/entity
""".splitlines()
)
MOVED_OF_OPTIMIZER = dict(
    line.split()
    for line in """\
loss_scaling_factor precision/loss_scaling_factor
initial_loss_scale precision/initial_loss_scale
steps_per_increase precision/steps_per_increase
min_loss_scale precision/min_loss_scale
max_loss_scale precision/max_loss_scale
max_gradient_norm precision/max_gradient_norm
max_gradient_value precision/max_gradient_value
grad_accum_steps loop/grad_accum_steps
""".splitlines()
)


def tree(text):
    problems = Problems()
    found = convert_legacy(read_text(text, "v1.yaml"), problems)
    assert problems.lines() == []
    return found


def convert(text):
    return to_plain(tree(text))


def init(text):
    return convert(text)["trainer"]["init"]


def complaints(text):
    problems = Problems()
    convert_legacy(read_text(text, "v1.yaml"), problems)
    return problems.lines()


def positions(node):
    yield node.at
    if isinstance(node, Sequence):
        for item in node.items:
            yield from positions(item)
    if isinstance(node, Mapping):
        for entry in node.entries.values():
            yield entry.key_at
            yield from positions(entry.node)


def at(node, *keys):
    place = Place.root(node)
    for key in keys:
        place = place.inside((key,))
    return place


def nested(target, value):
    """Return `init` with `value` at a target; callbacks and loggers are lists."""
    for key in reversed(target.split("/")):
        value = {key: value}
    return {
        key: [inner] if key in ("callbacks", "loggers") else inner for key, inner in value.items()
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {name: x}", True),
        ("runconfig: {max_steps: 1}\nunknown: 1", True),
        ("wandb: null", True),
        ("trainer: {init: {}}", False),
        ("trainer: null\nmodel: {}", False),
        ("trainr: {init: {}}\nmodel: {}", False),
        ("Trainer: {init: {}}\nmodel: {}", False),
        ("train: {}\nmodel: {}", True),
        ("1: {}", False),
        ("init: {}", False),
        ("[model]", False),
        ("model", False),
    ],
)
def test_the_older_layout_is_recognised_by_its_sections(text, expected):
    assert is_legacy(read_text(text, "v1.yaml")) is expected


def test_a_full_file_becomes_a_full_trainer():
    assert convert(FULL) == CONVERTED


def test_the_sections_of_init_come_in_their_usual_order():
    found = list(init(FULL))
    assert found == [key for key in INIT_KEYS if key in found]


def test_the_result_as_yaml_reads_back_equal():
    text = to_yaml(convert(FULL))
    assert to_plain(read_text(text, "resolved.yaml")) == CONVERTED


def test_the_file_itself_is_not_changed():
    root = read_text(FULL, "v1.yaml")
    before = to_plain(root)
    convert_legacy(root, Problems())
    assert to_plain(root) == before


def test_every_position_is_one_of_the_file():
    lines = {found.line for found in positions(tree(FULL))}
    assert {found.source for found in positions(tree(FULL))} == {"v1.yaml"}
    assert min(lines) == 1
    assert max(lines) == len(FULL.splitlines())


def test_a_value_keeps_its_place_and_that_of_its_key():
    place = at(tree(FULL), "trainer", "init", "loop", "max_steps")
    assert place.key_at == FilePosition("v1.yaml", 40, 3)
    assert place.node.at == FilePosition("v1.yaml", 40, 14)


def test_a_mapping_that_the_file_does_not_have_is_where_its_section_is():
    place = at(tree(FULL), "trainer", "init", "loop")
    assert place.key_at == FilePosition("v1.yaml", 32, 1)
    assert place.node.at == FilePosition("v1.yaml", 33, 3)


def test_a_class_is_where_its_name_was_the_value():
    found = tree(FULL)
    optimizer = at(found, "trainer", "init", "optimizer", "AdamW")
    scheduler = at(found, "trainer", "init", "schedulers", 0, "SequentialLR", "schedulers", 1)
    assert optimizer.key_at == FilePosition("v1.yaml", 20, 19)
    assert scheduler.inside(("CosineDecayLR",)).key_at == FilePosition("v1.yaml", 26, 19)


@pytest.mark.parametrize(("key", "target"), MOVED.items())
def test_a_key_is_moved_to_its_place(key, target):
    section, name = key.split(".")
    found = init(f"{section}: {{{name}: true}}")
    found.pop("model", None)
    assert found == nested(target, True)


@pytest.mark.parametrize(("key", "target"), MOVED_OF_OPTIMIZER.items())
def test_a_key_of_the_optimizer_is_moved_to_its_place(key, target):
    found = init(f"optimizer: {{optimizer_type: SGD, {key}: 3}}")
    assert found == {"optimizer": {"SGD": {}}} | nested(target, 3)


def test_every_key_that_moves_has_a_row_here():
    sections = {
        "runconfig": legacy_keys.RUNCONFIG,
        "model": legacy_keys.MODEL,
        "wandb": legacy_keys.WANDB,
        **legacy_keys.INPUTS,
    }
    moving = {f"{section}.{key}" for section, table in sections.items() for key in table}
    assert moving == set(MOVED)
    assert set(legacy_keys.OPTIMIZER) == {*MOVED_OF_OPTIMIZER, "log_summaries"}


def test_no_two_keys_go_to_the_same_place():
    targets = [*MOVED.values(), *MOVED_OF_OPTIMIZER.values()]
    assert len(set(targets)) == len(targets)


def test_every_callback_and_logger_has_its_place_in_the_list():
    targets = [target.split("/") for target in MOVED.values()]
    named = {parts[1] for parts in targets if parts[0] in ("callbacks", "loggers")}
    switched = {*legacy_keys.RUNCONFIG_SWITCHES.values(), "ComputeNorm", "LogSparsity"}
    assert named | switched == {*legacy_keys.CALLBACK_ORDER, *legacy_keys.LOGGER_ORDER}


@pytest.mark.parametrize(
    ("text", "callbacks"),
    [
        ("runconfig: {check_loss_values: true}", [{"CheckLoss": {}}]),
        ("runconfig: {check_loss_values: false}", [{"CheckLoss": None}]),
        ("runconfig: {log_input_summaries: true}", [{"LogInputSummaries": {}}]),
        ("runconfig: {dump_activations: true}", [{"DumpActivations": {}}]),
        ("runconfig: {dump_activations: false}", None),
        ("runconfig: {check_loss_values: null}", None),
        ("runconfig: {max_checkpoints: null, load_checkpoint_states: null}", None),
        ("optimizer: {optimizer_type: SGD, log_summaries: true}", [{"ComputeNorm": {}}]),
        ("optimizer: {optimizer_type: SGD, log_summaries: false}", [{"ComputeNorm": None}]),
        ("sparsity: {sparsity: 0.1, add_summaries: true}", [{"LogSparsity": {}}]),
        ("sparsity: [{sparsity: 0.1}, {add_summaries: true}]", [{"LogSparsity": {}}]),
        ("sparsity: {sparsity: 0.1, add_summaries: false}", None),
        ("model: {lora_params: null}", None),
    ],
)
def test_a_switch_adds_a_callback_or_removes_a_default(text, callbacks):
    assert init(text).get("callbacks") == callbacks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.3", 0.3),
        ("{sparsity: 0.3, add_summaries: true}", {"sparsity": 0.3}),
        ("[{sparsity: 0.3, add_summaries: false}, {a: 1}]", [{"sparsity": 0.3}, {"a": 1}]),
        ("{add_summaries: true}", None),
        ("null", None),
    ],
)
def test_sparsity_is_moved_without_its_summaries(text, expected):
    assert init(f"sparsity: {text}").get("sparsity") == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{optimizer_type: adamw, betas: [0.9, 0.95]}", {"adamw": {"betas": [0.9, 0.95]}}),
        ("{optimizer_type: Adam, beta1: 0.8}", {"Adam": {"betas": [0.8, 0.999]}}),
        ("{optimizer_type: Lion, beta1: 0.8}", {"Lion": {"betas": [0.8, 0.99]}}),
        (
            "{optimizer_type: Adafactor, beta1: 0.8, eps1: 0.1, eps2: 0.2}",
            {"Adafactor": {"eps": [0.1, 0.2], "beta1": 0.8}},
        ),
        (
            "{optimizer_type: Rprop, eta1: 0.1, eta2: 2, step_size_min: 1, step_size_max: 3}",
            {"Rprop": {"etas": [0.1, 2], "step_sizes": [1, 3]}},
        ),
        (
            "{optimizer_type: SGD, momentum: 0.9, use_nesterov: true, weight_decay_rate: 1}",
            {"SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 1}},
        ),
        ("{optimizer_type: SGD, learning_rate: 0.1, lr: 3}", {"SGD": {"lr": 3}}),
    ],
)
def test_an_optimizer_has_todays_arguments(written, expected):
    assert init(f"optimizer: {written}")["optimizer"] == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0.1", [{"ConstantLR": {"learning_rate": 0.1}}]),
        ("null", None),
        ("{scheduler: constant, learning_rate: 1}", [{"ConstantLR": {"learning_rate": 1}}]),
        ("{scheduler: ConstantLR, learning_rate: 1}", [{"ConstantLR": {"learning_rate": 1}}]),
        (
            "{scheduler: PiecewiseConstant, values: [1, 2], boundaries: [3]}",
            [{"PiecewiseConstantLR": {"learning_rates": [1, 2], "milestones": [3]}}],
        ),
        (
            "{scheduler: CosineAnnealing, learning_rate: 1, t_max: 3}",
            [{"CosineAnnealingLR": {"initial_learning_rate": 1, "T_max": 3}}],
        ),
        (
            "[{scheduler: Exponential, decay_steps: 1, main_scheduler: sequential}]",
            [{"ExponentialLR": {"total_iters": 1}}],
        ),
        (
            "[{scheduler: Step, gamma: 1, main_scheduler: chained}, {scheduler: Lambda}]",
            [{"ChainedScheduler": {"schedulers": [{"StepLR": {"gamma": 1}}, {"LambdaLR": {}}]}}],
        ),
        ("{scheduler: my.Schedule, steps: 2}", [{"my.Schedule": {"total_iters": 2}}]),
    ],
)
def test_a_learning_rate_becomes_schedulers(written, expected):
    found = init(f"optimizer: {{optimizer_type: SGD, learning_rate: {written}}}")
    assert found.get("schedulers") == expected
    assert found["optimizer"] == {"SGD": {}}


@pytest.mark.parametrize(
    "name",
    [name for name in SCHEDULERS if not name.endswith("WD") and name not in (*COMPOSED, *OURS)],
)
def test_every_shipped_scheduler_has_its_older_name(name):
    old = name.removesuffix("LR").lower()
    found = init(f"optimizer: {{optimizer_type: SGD, learning_rate: {{scheduler: {old}}}}}")
    assert found["schedulers"] == [{name: {}}]


@pytest.mark.parametrize(
    ("adjust", "is_wrapped"),
    [("{embedding: 0.5}", True), ("{}", False), ("null", False)],
)
def test_adjusted_learning_rates_scale_the_schedule(adjust, is_wrapped):
    found = init(
        f"optimizer: {{optimizer_type: SGD, learning_rate: 1, adjust_learning_rate: {adjust}}}"
    )
    constant = {"ConstantLR": {"learning_rate": 1}}
    expected = {"ScalePerParamLR": {"scheduler": constant}} if is_wrapped else constant
    assert found["schedulers"] == [expected]


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("train_input: {a: 1}", {"fit": {"train_dataloader": {"a": 1}}}),
        (
            "eval_input: {a: 1}\nrunconfig: {checkpoint_path: null}",
            {
                "validate": {"val_dataloader": {"a": 1}, "ckpt_path": None},
                "validate_all": {"val_dataloaders": {"a": 1}, "ckpt_paths": None},
            },
        ),
        ("train_input: null\nruncfg: 1\nmodel: {}", {}),
    ],
)
def test_what_can_be_run_follows_from_the_inputs(text, sections):
    problems = Problems()
    found = to_plain(convert_legacy(read_text(text, "v1.yaml"), problems))["trainer"]
    assert {key: value for key, value in found.items() if key != "init"} == sections


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "model: {}\nrunconfig:\n  max_setps: 3",
            "3:3: runconfig.max_setps: no such key in runconfig. Did you mean 'max_steps'?",
        ),
        (
            "runconfig:\n  grad_accum_steps: 3",
            "2:3: runconfig.grad_accum_steps: no such key in runconfig. It belongs in optimizer.",
        ),
        (
            "model: {}\nmax_steps: 3",
            "2:1: max_steps: no such key in the older layout. It belongs in runconfig.",
        ),
        (
            "model: {}\noptimiser: {}",
            "2:1: optimiser: no such key in the older layout. Did you mean 'optimizer'?",
        ),
        (
            "runconfig:\n  save_losses: true",
            "2:3: runconfig.save_losses: no such key in runconfig. Remove it: the loss is "
            "always logged.",
        ),
        (
            "optimizer:\n  optimizer_type: SGD\n  disable_lr_steps_reset: true",
            "3:3: optimizer.disable_lr_steps_reset: no such key in optimizer. Remove it: in a "
            "sequence each scheduler starts at its own step 0.",
        ),
        (
            "wandb:\n  projekt: a",
            "2:3: wandb.projekt: no such key in wandb. Did you mean 'project'?",
        ),
        (
            "model:\n  mixed_precison: true",
            "2:3: model.mixed_precison: no such key in model. Did you mean 'mixed_precision'?",
        ),
        (
            "optimizer:\n  optimizer_type: SGD\n  max_gradient_nrom: 1",
            "3:3: optimizer.max_gradient_nrom: no such key in optimizer. Did you mean "
            "'max_gradient_norm'?",
        ),
        (
            "train_input:\n  micro_batchsize: 1",
            "2:3: train_input.micro_batchsize: no such key in train_input. Did you mean "
            "'micro_batch_size'?",
        ),
        (
            "runconfig:\n  experimental:\n    listener: []",
            "3:5: runconfig.experimental.listener: no such key in runconfig.experimental. Did you "
            "mean 'listeners'?",
        ),
        ("model:\n- 1", "2:1: model: expected a mapping, got [1]."),
        ("runconfig: 3", "1:12: runconfig: expected a mapping, got 3."),
        (
            "runconfig:\n  experimental: true",
            "2:17: runconfig.experimental: expected a mapping, got true.",
        ),
        (
            "runconfig:\n  experimental: {listeners: [{a: 1}]}",
            "2:30: runconfig.experimental.listeners[0].listener_type: missing; expected the class "
            "of the listener.",
        ),
        (
            "runconfig:\n  experimental: {listeners: {a: 1}}",
            "2:29: runconfig.experimental.listeners: expected a list of listeners, got a mapping.",
        ),
        (
            "runconfig:\n  check_loss_values: 1",
            "2:22: runconfig.check_loss_values: expected true or false, got 1.",
        ),
        (
            "optimizer:\n  learning_rate: 1",
            "1:1: optimizer.optimizer_type: missing; it selects the optimizer.",
        ),
        (
            "optimizer:\n  optimizer_type: 1",
            "2:19: optimizer.optimizer_type: expected the name of an optimizer, got 1.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: {scheduler: 3}}",
            "1:61: optimizer.learning_rate.scheduler: expected the name of a scheduler, got 3.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: {scheduler: Step, main_scheduler: 3}}",
            "1:83: optimizer.learning_rate.main_scheduler: expected sequential or chained, got 3.",
        ),
        (
            "optimizer: {optimizer_type: SGD, weight_decay: 1, weight_decay_rate: 2}",
            "1:51: optimizer.weight_decay_rate: the same setting as optimizer.weight_decay "
            "(line 1). Remove one of them.",
        ),
        (
            "optimizer: {optimizer_type: Adam, beta1: 1, betas: [1, 2]}",
            "1:35: optimizer.beta1: the same setting as optimizer.betas (line 1). Remove one of "
            "them.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: []}",
            "1:49: optimizer.learning_rate: the list is empty; expected schedulers.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: [1]}",
            "1:50: optimizer.learning_rate[0]: expected a mapping with scheduler "
            "and its arguments, got 1.",
        ),
        (
            "optimizer:\n  optimizer_type: SGD\n  learning_rate: {steps: 3}",
            "3:3: optimizer.learning_rate.scheduler: missing; it selects the scheduler.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: {scheduler: Lineer}}",
            "1:61: optimizer.learning_rate.scheduler: 'Lineer' is not a scheduler. Did you mean "
            "'Linear'?",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: {scheduler: Step, steps: 1, "
            "decay_steps: 2}}",
            "1:77: optimizer.learning_rate.decay_steps: the same setting as "
            "optimizer.learning_rate.steps (line 1). Remove one of them.",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: [{scheduler: Step, main_scheduler: "
            "chaind}]}",
            "1:84: optimizer.learning_rate[0].main_scheduler: 'chaind' is not valid. Did you mean "
            "'chained'?",
        ),
        (
            "optimizer: {optimizer_type: SGD, learning_rate: [\n"
            "{scheduler: Step, main_scheduler: chained},\n"
            "{scheduler: Step, main_scheduler: sequential}]}",
            "3:35: optimizer.learning_rate[1].main_scheduler: 'sequential' differs from an earlier "
            "item, which selects ChainedScheduler. Use the same main_scheduler in all items.",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_where_it_stands(text, line):
    assert complaints(text) == [f"v1.yaml:{line}"]


def test_all_problems_are_found_together():
    found = complaints("model: 1\nrunconfig: {max_setps: 1}\noptimizer: {}\n")
    assert [line.split(":")[1] for line in found] == ["1", "2", "3"]


def test_the_mode_of_a_file_is_logged_and_left_to_the_command(caplog):
    caplog.set_level("INFO", "modelzoo_trainer.config")
    assert init("runconfig: {mode: train}") == {}
    assert caplog.messages == ["runconfig.mode is ignored: the command line selects the mode."]


def test_an_alias_may_be_moved_to_two_places():
    found = convert("train_input: &data {batch_size: 4}\neval_input: *data")["trainer"]
    assert found["fit"]["train_dataloader"] == found["validate"]["val_dataloader"]


def test_a_constant_of_the_conversion_is_where_the_section_is():
    place = at(tree("optimizer:\n  optimizer_type: Adam\n  beta1: 0.8"), "trainer", "init")
    betas = place.inside(("optimizer", "Adam", "betas")).node
    assert [(item.value, item.at.line) for item in betas.items] == [(0.8, 3), (0.999, 2)]
    assert all(isinstance(item, Scalar) for item in betas.items)


VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 3, 0.5, "", "SGD", "linear", "chained", "x.y"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["scheduler", "main_scheduler", "steps", "listeners", "listener_type", 1, None]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *(key.split(".")[1] for key in MOVED),
        *MOVED_OF_OPTIMIZER,
        *legacy_keys.RUNCONFIG_SWITCHES,
        *legacy_keys.RUNCONFIG_OTHERS,
        "optimizer_type",
        "learning_rate",
        "adjust_learning_rate",
        "beta1",
        "betas",
        "add_summaries",
        "anything",
    ]
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from([*legacy_keys.SECTIONS, "other"]),
        VALUES | st.dictionaries(KEYS, VALUES, max_size=6),
        min_size=1,
    )
)
def test_whatever_a_file_says_it_is_converted_or_refused(plain):
    root = read_text(to_yaml(plain), "v1.yaml")
    problems = Problems()
    found = convert_legacy(root, problems)
    assert list(to_plain(found)) == ["trainer"]
    assert to_plain(read_text(to_yaml(to_plain(found)), "again.yaml")) == to_plain(found)
    assert {position.source for position in positions(found)} == {"v1.yaml"}
    assert all(line.startswith("v1.yaml:") for line in problems.lines())


@pytest.mark.parametrize("mode", ["train", "train_and_eval", "eval", "eval_all"])
def test_an_older_file_of_shipped_classes_passes_the_check(mode):
    (plan,) = check_config(tree(DIGITS), shipped_names(), mode)
    assert plan.resolved == convert(DIGITS)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ("max_steps: 14", "max_steps: many"),
            "19:14: trainer.init.loop.max_steps: expected an integer > 0 or null, got 'many'.",
        ),
        (("depth: 2", "dept: 2"), "6:3: trainer.init.model.dept: no such argument"),
        (("type: adamw", "type: adamv"), "9:19: trainer.init.optimizer.adamv: 'adamv' is not an"),
        (("weight_decay_rate: 0.1", "weight_decay_rate: x"), "11:22: trainer.init.optimizer.adamw"),
        (
            ("0.01, steps: 5", "0.01, steps: x"),
            "13:85: trainer.init.schedulers[0].SequentialLR.schedulers[0].LinearLR.total_iters",
        ),
        (("max_checkpoints: 2", "max_checkpoints: x"), "23:20: trainer.init.callbacks[2].KeepN"),
        (("name: fc_mnist", "nme: fc_mnist"), "4:3: trainer.init.model.nme: no such key. Did you"),
    ],
)
def test_a_wrong_value_is_reported_on_its_own_line(change, line):
    with pytest.raises(ConfigError) as caught:
        check_config(tree(DIGITS.replace(*change)), shipped_names(), "train")
    (found,) = str(caught.value).splitlines()
    assert found.startswith(f"v1.yaml:{line}")
