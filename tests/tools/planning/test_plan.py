from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer.base.devices import fake_world
from modelzoo_trainer.cli import command
from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.planning import measure as measuring
from modelzoo_trainer.tools.planning.command import plan_on_paper
from modelzoo_trainer.tools.planning.figures import Figures
from modelzoo_trainer.tools.planning.measure import Built, measure
from modelzoo_trainer.tools.planning.memory_tracker import MemoryKind
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

LLAMA_70B = Path(__file__).with_name("llama_70b.yaml")
FILE = """
trainer:
  init:
    device: CPU
    model_dir: {folder}
    model:
      name: llama
      vocab_size: 512
      hidden_size: 64
      max_position_embeddings: 16
      position_embedding_type: rotary
      rotary_dim: 16
      share_embedding_weights: false
      num_hidden_layers: 3
      norm_type: rmsnorm
      dropout_rate: 0.0
      attention_dropout_rate: 0.0
      num_heads: 4
      use_projection_bias_in_attention: false
      use_ffn_bias_in_attention: false
      filter_size: 128
      nonlinearity: swiglu
      use_ffn_bias: false
    optimizer: {{AdamW: {{learning_rate: 0.001}}}}
    precision: {{enabled: false, max_gradient_norm: 1.0}}
    loop: {{num_steps: 3, eval_frequency: null}}
    seed: 1
  fit:
    train_dataloader:
      data_processor: SyntheticProcessor
      kind: tokens
      batch_size: 4
      num_samples: 64
      max_sequence_length: 16
      vocab_size: 512
"""
SHARD = "init.backend.parallel={shard: -1}"
Measure = Callable[..., Figures]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "model.yaml"
    path.write_text(FILE.format(folder=folder / "run"))  # which nobody makes
    return path


@pytest.fixture(scope="module")
def figures(file: Path) -> Measure:
    @cache
    def find(num: int, *changes: str) -> Figures:
        with fake_world(num):
            return measure(plan_of(file, changes))

    return find


def plan_of(path: Path, changes: Any) -> Any:
    [plan] = load_plans(path, shipped_names, mode="train", changes=changes, for_a_run=False)
    return plan


def sent(figures: Figures, kind: str) -> tuple[int, int]:
    found = [one for (name, _), one in figures.exchanges.items() if name == kind]
    return sum(one.num_calls for one in found), sum(one.num_bytes for one in found)


def all_sent(figures: Figures) -> int:
    return sum(one.num_sent for one in figures.exchanges.values())


def train_and_watch(rank: int, path: Path, changes: list[str]) -> dict[str, float]:
    from benchmarks.plan import real

    return real(rank, path, changes, "allocator")


def test_a_process_alone_holds_all_and_sends_nothing(figures: Measure) -> None:
    found = figures(1)

    size = found.num_params * 4
    assert found.num_params_here == found.num_params
    assert found.training.highest[MemoryKind.PARAMETERS] == size
    assert found.training.highest[MemoryKind.GRADIENTS] == size
    assert found.training.highest[MemoryKind.OPTIMIZER] == pytest.approx(2 * size, rel=0.01)
    assert found.exchanges == {}
    assert found.checkpoint_bytes == pytest.approx(3 * size, rel=0.01)
    assert sum(found.training.parts.values()) == found.training.total


def test_replicas_send_their_gradients_once(figures: Measure) -> None:
    found = figures(8)

    assert found.axes == {"replicate": 8, "shard": 1, "context": 1, "tensor": 1}
    assert found.num_params_here == found.num_params
    calls, size = sent(found, "all-reduce")
    assert size == pytest.approx(found.num_params * 4, rel=0.001)
    assert calls <= 4
    assert found.training.highest[MemoryKind.OPTIMIZER] == pytest.approx(
        8 * found.num_params, rel=0.01
    )


def test_shards_hold_their_part_and_gather_the_rest(figures: Measure) -> None:
    alone, found = figures(1), figures(8, SHARD)

    assert found.num_params == alone.num_params
    assert found.num_params_here == pytest.approx(alone.num_params / 8, rel=0.01)
    assert found.training.total < alone.training.total
    assert found.flops == alone.flops
    calls, size = sent(found, "reduce-scatter")
    assert calls == 4  # three layers and what is around them
    assert size == pytest.approx(found.num_params * 4, rel=0.01)
    assert sent(found, "all-gather")[1] > found.num_params * 4


@pytest.mark.slow
def test_layers_with_parallel_branches_are_planned_like_others(figures: Measure) -> None:
    gated = figures(2, "init.model.name=falcon", "init.model.use_untied_layer_norm=true")
    one_norm = figures(2, "init.model.name=falcon")

    assert gated.num_params == figures(2).num_params
    assert gated.num_params - one_norm.num_params == 3 * 64
    assert gated.flops == figures(2).flops


@pytest.mark.slow
def test_accumulated_batches_are_sent_once_and_computed_each(figures: Measure) -> None:
    once, found = figures(4), figures(4, "init.loop.grad_accum_steps=3")

    assert found.num_batches == 3
    assert found.flops == 3 * once.flops
    assert sent(found, "all-reduce")[1] == pytest.approx(sent(once, "all-reduce")[1], rel=0.001)


def test_recomputed_activations_take_less_memory_and_more_arithmetic(figures: Measure) -> None:
    kept, found = figures(1), figures(1, "init.backend.activation_checkpointing=full")

    assert (
        found.training.highest[MemoryKind.ACTIVATIONS]
        < kept.training.highest[MemoryKind.ACTIVATIONS]
    )
    assert found.flops > kept.flops


@pytest.mark.parametrize("mode", [None, "selective"])
def test_positions_that_are_split_take_less_memory(figures: Measure, mode: str | None) -> None:
    changes = [f"init.model.{name}" for name in ("max_position_embeddings=256", "vocab_size=64")]
    data = ("max_sequence_length=256", "vocab_size=64")
    changes += [f"fit.train_dataloader.{name}" for name in data]
    changes += ["init.backend.parallel={tensor: 4}"]
    changes += [] if mode is None else [f"init.backend.activation_checkpointing={mode}"]

    whole = figures(4, *changes)
    found = figures(4, *changes, "init.backend.sequence_parallel=true")

    states = 4 * 256 * 64 * 4  # bytes
    # Both parts of three layers, forward and backward.
    assert sent(found, "reduce-scatter") == (12, 12 * states)
    # Forward: these parts, and states before the head. Backward: outputs of these parts, the input
    # of the first layer, and again what the weights were multiplied with.
    num_again = 6 if mode is None else 12
    num_calls, num_bytes = sent(whole, "all-gather")
    num_more = 7 + 7 + num_again
    assert sent(found, "all-gather") == (num_calls + num_more, num_bytes + num_more * states)
    assert sent(found, "all-reduce")[1] < 0.2 * sent(whole, "all-reduce")[1]
    assert kept(found) < 0.75 * kept(whole)
    assert found.flops == whole.flops


def kept(figures: Figures) -> int:
    highest = figures.training.highest
    return highest[MemoryKind.ACTIVATIONS] + highest[MemoryKind.EXCHANGE]


@pytest.fixture
def own_file(file: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.yaml"
    copy.write_text(file.read_text())
    return copy


def test_the_memory_of_a_real_process_is_what_was_said(figures: Measure, own_file: Path) -> None:
    [found] = run_ranks(1, train_and_watch, own_file, [])

    assert found["memory"] == pytest.approx(figures(1).peak_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_memory_of_two_real_replicas_is_what_was_said(figures: Measure, own_file: Path) -> None:
    found = run_ranks(2, train_and_watch, own_file, [])

    # The profiler does not see what gloo's thread happens to free; other talk is sent besides.
    assert min(one["memory"] for one in found) == pytest.approx(figures(2).peak_bytes, rel=0.1)
    assert min(one["sent"] for one in found) == pytest.approx(all_sent(figures(2)), rel=0.1)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_two_real_shards_send_is_what_was_said(figures: Measure, own_file: Path) -> None:
    found = run_ranks(2, train_and_watch, own_file, [SHARD])

    assert min(one["sent"] for one in found) == pytest.approx(all_sent(figures(2, SHARD)), rel=0.1)


@pytest.mark.slow
def test_a_thousand_processes_are_planned_in_one(figures: Measure) -> None:
    found = figures(1024, SHARD)

    assert found.world_size == found.num_data_shards == 1024
    assert found.num_params_here < found.num_params / 32


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_without_their_memory() -> None:
    meta = "init.backend.sharding={meta_init: true, param_dtype: bfloat16, reduce_dtype: float32}"
    with fake_world(512):
        found = measure(plan_of(LLAMA_70B, [SHARD, meta]))

    assert found.num_params == 68_976_648_192
    assert found.training.total < 32 * 2**30
    assert found.building.total < 8 * 2**30


# ---- the command


def run(file: Path, *words: str) -> int:
    return command.main(["--params", str(file), "--plan", *words])


def test_the_command_prints_a_table_and_writes_nothing(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)

    with caplog.at_level(logging.INFO, logger="modelzoo_trainer"):
        assert run(file) == 0

    text = capsys.readouterr().out
    assert caplog.messages == []  # not a report of the two steps on fake tensors
    assert "one process, device cpu" in text.splitlines()[0]
    assert "No communication" in text
    assert "optimizer state" in text
    assert list(tmp_path.iterdir()) == []
    assert list(file.parent.iterdir()) == [file]


class Following(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows whose length is that of the model."""

    length = 1

    def follow_model(self, model: Any) -> None:
        self.length = model.max_position_embeddings

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(self.length, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}


class FollowingProcessor:
    def create_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Following(), batch_size=4)


def test_data_that_follows_the_model_is_planned_as_it_is_trained_on(file: Path) -> None:
    changes = [f"fit.train_dataloader={{data_processor: {__name__}.FollowingProcessor}}"]
    with fake_world(1):
        followed = measure(plan_of(file, changes))
    with fake_world(1):
        assert followed.flops == measure(plan_of(file, ())).flops


def test_processes_that_do_not_fit_the_mesh_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(file, "--world-size", "6", "--set", "init.backend.parallel={shard: 4}")

    assert code == 2
    assert "a multiple of 4 processes, but there are 6" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "eight", "-1", "2.5"])
def test_a_world_size_is_a_number(
    file: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, f"--world-size={size}") == 2
    err = capsys.readouterr().err
    assert "--world-size" in err
    assert f"'{size}'" in err


def test_the_options_of_the_plan_need_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--params", str(file), "--world-size", "8"])
    assert "--world-size, --memory, --devices and --data require --plan" in capsys.readouterr().err


def test_a_lazy_device_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--device", "xla") == 2
    assert "--plan does not support torch_xla" in capsys.readouterr().err


def test_a_device_that_is_not_here_can_be_planned(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, "--device", "gpu") == 0
    assert "device gpu" in capsys.readouterr().out


def test_the_two_steps_are_not_reported_like_a_run(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "modelzoo_trainer")
    schedule = "{initial_learning_rate: 0.1, end_learning_rate: 0.0, total_iters: 50}"
    assert run(file, f"--set=init.schedulers=[LinearLR: {schedule}]") == 0
    assert "Finished" not in caplog.text
    assert "the schedule ends" not in caplog.text


def test_a_file_that_only_validates_is_refused(figures: Measure, file: Path) -> None:
    plan = plan_of(file, [])
    with fake_world(1), pytest.raises(ConfigError, match=r"train_and_eval, got eval"):
        measure(type(plan)(**{**fields_of(plan), "mode": "eval"}))
    with fake_world(1), pytest.raises(ConfigError, match=r"fit\.train_dataloader"):
        measure(type(plan)(**{**fields_of(plan), "call": {}}))


def test_the_help_of_the_benchmark_runs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.plan import main as run_benchmark

    monkeypatch.setattr("sys.argv", ["plan.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        run_benchmark()
    assert "--processes" in capsys.readouterr().out


def fields_of(plan: Any) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in type(plan).__dataclass_fields__}


def test_what_fits_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--memory", "1GiB") == 0
    assert "It fits: " in capsys.readouterr().out


@pytest.mark.slow
def test_what_does_not_fit_is_tried_with_settings_that_take_less(file: Path) -> None:
    def load(changes: list[str]) -> list[Any]:
        return [plan_of(file, changes)]

    fits, text = plan_on_paper(load, "8", "3MiB")

    assert not fits
    assert "It does not fit: " in text
    assert f"--set '{SHARD}'" in text
    assert " fits." in text


@pytest.mark.slow
def test_what_nothing_helps_ends_with_an_error_code(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, "--memory", "1KiB") == 1
    text = capsys.readouterr().out
    assert "still does not fit." in text
    assert "smaller batches" in text


@pytest.mark.slow
def test_a_bias_of_all_scores_is_counted_where_there_is_one(figures: Measure) -> None:
    longer = (
        "init.model.max_position_embeddings=256",
        "fit.train_dataloader.max_sequence_length=256",
        "init.model.rotary_dim=null",
    )
    alibi = "init.model.position_embedding_type=alibi"
    plain = figures(1, *longer, "init.model.position_embedding_type=null").training.total
    blocks = figures(1, *longer, alibi).training.total
    dense = figures(1, *longer, alibi, "init.model.attention=dense").training.total

    bias = 4 * 256 * 256 * 4  # heads, queries, keys, bytes
    assert dense - plain >= bias
    assert blocks - plain < bias / 4


MOE = "init.model.moe={num_experts: 3, top_k: 2, num_shared_experts: 1}"


@pytest.mark.slow
def test_experts_are_planned_with_all_weights_but_the_work_of_those_in_use(
    figures: Measure,
) -> None:
    plain, found, halves = figures(1), figures(1, MOE), figures(2, MOE, SHARD)

    layers, tokens, hidden, width = 3, 4 * 16, 64, 128
    expert, router = 3 * hidden * width, 3 * hidden
    assert found.num_params == plain.num_params + layers * (3 * expert + router)
    assert found.training.highest[MemoryKind.PARAMETERS] == found.num_params * 4
    # A product of a matrix with tokens, and two for gradients; a multiply-add is two operations.
    # Two routed experts and a shared one, instead of one network.
    assert found.flops == plain.flops + layers * 3 * 2 * tokens * (2 * expert + router)
    assert found.num_host_reads == plain.num_host_reads
    more = (
        found.training.highest[MemoryKind.ACTIVATIONS]
        - plain.training.highest[MemoryKind.ACTIVATIONS]
    )
    # Of each further expert in use, four in float32; its inputs and outputs, and these in order.
    assert more > layers * 2 * 4 * tokens * width * 4
    assert more < layers * (2 * 4 * width + 3 * 5 * hidden) * tokens * 4
    assert halves.num_params_here == pytest.approx(found.num_params / 2, rel=0.001)


LONG = (
    "init.model.max_position_embeddings=1024",
    "fit.train_dataloader.max_sequence_length=1024",
    "init.model.attention_module=multiquery_attention",
    "init.model.extra_attention_params={num_kv_groups: 1}",
)


def test_processes_along_context_have_their_part_of_the_activations(figures: Measure) -> None:
    alone, found = figures(1, *LONG), figures(4, *LONG, "init.backend.parallel={context: 4}")

    assert found.axes == {"replicate": 1, "shard": 1, "context": 4, "tensor": 1}
    assert found.num_data_shards == 1
    before, now = (one.training.highest[MemoryKind.ACTIVATIONS] for one in (alone, found))
    assert now == pytest.approx(before / 4, rel=0.15)  # each layer keeps keys and values of all
    layers, keys_and_values = 3, 2 * 4 * 1024 * 16 * 4  # bytes of a layer
    assert sent(found, "all-gather") == (layers, layers * keys_and_values)
    assert sent(found, "reduce-scatter") == (layers, layers * keys_and_values)


def test_a_plan_names_the_length_that_processes_cannot_split(file: Path) -> None:
    message = r"context is 16, but a row has 16 positions.* a multiple of 32 "
    with pytest.raises(ConfigError, match=message), fake_world(16):
        measure(plan_of(file, ("init.backend.parallel={context: 16}",)))


# ---- few layers of many


LAYERS = "init.model.num_hidden_layers=9"
FULL = "init.backend.activation_checkpointing=full"
META = "init.backend.sharding={meta_init: true}"
FROM_HOST = "init.backend.sharding={meta_init: false}"
WINDOWS = (
    "init.model.attention_sliding_window_length=4",
    "init.model.sliding_window_every_other_decoder_layer=true",
)
PARTS = 'init.callbacks[ScopedTrainFlags]."csx.performance.micro_batch_size"=1'
KINDS = {
    "alone": (1, ()),
    "shards": (2, (SHARD, FULL, META)),
    "selective": (1, ("init.backend.activation_checkpointing=selective",)),
    "tensor": (4, ("init.backend.parallel={tensor: 2, shard: 2}",)),
    "windows": (1, (*WINDOWS, PARTS)),
    "experts": (1, (MOE,)),
    "accumulated": (2, (SHARD, PARTS, "init.loop.grad_accum_steps=2")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_few_layers_are_those_of_all(file: Path, kind: str) -> None:
    num, changes = KINDS[kind]
    with fake_world(num):
        plan = plan_of(file, (LAYERS, *changes))
        all_layers, few = measure(plan, all_layers=True), measure(plan)

    for name in ("num_params", "num_params_here", "flops", "num_host_reads", "num_batches"):
        assert getattr(few, name) == getattr(all_layers, name), name
    for name in ("checkpoint_bytes", "checkpoint_bytes_here", "peak_bytes"):
        assert getattr(few, name) == pytest.approx(getattr(all_layers, name), rel=0.001), name
    for one, other in ((few.training, all_layers.training), (few.building, all_layers.building)):
        assert one.total == pytest.approx(other.total, rel=0.001)
        assert one.parts == pytest.approx(other.parts, rel=0.01)
        assert one.highest == pytest.approx(other.highest, rel=0.01)
    assert {key: one.num_bytes for key, one in few.exchanges.items()} == (
        {key: one.num_bytes for key, one in all_layers.exchanges.items()}
    )


@pytest.mark.parametrize(
    ("kind", "num"), [((META, MOE), 1), ((META, *WINDOWS), 1), ((FROM_HOST,), 4)]
)
def test_a_model_on_meta_is_built_once_for_all_measurements(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...], num: int
) -> None:
    built, common = Built(), (LAYERS, SHARD, *kind)
    models: list[Any] = []
    repeats = measuring.repeats_of
    monkeypatch.setattr(measuring, "repeats_of", lambda one: models.append(one) or repeats(one))
    with fake_world(2):
        plans = [plan_of(file, (*common, *changes)) for changes in ((), (FULL,))]
        again = [measure(plan, one_step=True, built=built) for plan in plans]
        assert len(models) == num
        alone = [measure(plan, one_step=True) for plan in plans]

    assert again == alone
    assert again[0] != again[1]


@pytest.mark.parametrize("kind", ["alone", "shards", "accumulated"])
def test_the_memory_of_one_step_is_that_of_the_second(file: Path, kind: str) -> None:
    num, changes = KINDS[kind]
    with fake_world(num):
        plan = plan_of(file, changes)
        both, one = measure(plan), measure(plan, one_step=True)

    assert one.flops == both.flops
    assert one.peak_bytes == both.peak_bytes
    assert one.training.parts == both.training.parts
    assert one.training.highest == both.training.highest


def test_micro_batches_are_counted_and_not_all_measured(figures: Measure) -> None:
    once, parts = figures(1), figures(1, PARTS)

    assert (parts.num_batches, parts.batch_size, parts.num_samples) == (4, 1, 4)
    assert parts.flops == once.flops
    assert parts.training.highest[MemoryKind.BATCH] == once.training.highest[MemoryKind.BATCH]


def test_the_smallest_setting_that_fits_is_printed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, "--devices", "4", "--memory", "1GiB") == 0
    text = capsys.readouterr().out
    assert "The smallest setting that fits has 1 of 4 devices" in text
    assert "--set 'init.backend.parallel=null'" in text


@pytest.mark.parametrize(
    ("limit", "size", "part"),
    [("2.5MB", 4, "parallel:"), ("1.4MB", 1, "sequence_parallel: true")],
)
def test_a_setting_that_is_printed_fits(
    file: Path, limit: str, size: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = f"--set=fit.train_dataloader.batch_size={size}"
    assert run(file, "--devices", "8", "--memory", limit, batch) == 0
    text = capsys.readouterr().out
    assert part in text
    changes = [word.strip("'") for word in text.partition("command line: ")[2].split(" --set ")]
    changes = [one.removeprefix("--set '").splitlines()[0].strip("'") for one in changes]
    num = int(text.partition("has ")[2].split()[0])
    words = [batch, *(f"--set={one}" for one in changes)]
    assert run(file, "--world-size", str(num), "--memory", limit, *words) == 0


@pytest.mark.parametrize(
    "backend",
    [
        "{parallel: {shard: 3}}",
        "{parallel: {tensor: -1}, sequence_parallel: true}",
        "{activation_checkpointing: full}",
    ],
)
def test_a_search_replaces_the_settings_of_the_file(
    file: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    micro_batch = 'init.callbacks=[{ScopedTrainFlags: {"csx.performance.micro_batch_size": 2}}]'
    words = ("--devices", "4", "--memory", "1GiB")
    assert run(file, *words) == 0
    expected = capsys.readouterr().out

    assert run(file, *words, f"--set=init.backend={backend}", f"--set={micro_batch}") == 0

    assert capsys.readouterr().out == expected
    section = yaml.safe_load(expected.partition("\n\n")[2].partition("\n\n")[0])
    assert section["trainer"]["init"] == {
        "backend": {
            "parallel": None,
            "sharding": None,
            "activation_checkpointing": None,
            "tensor_plan": None,
            "sequence_parallel": False,
        },
        "callbacks": [{"ScopedTrainFlags": {"csx.performance.micro_batch_size": 4}}],
    }


@pytest.mark.parametrize("is_half", [False, True])
def test_a_search_shards_in_the_precision_of_the_file(
    file: Path, is_half: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = "{fp16_type: bfloat16}" if is_half else "null"
    words = ("--devices", "2", "--memory", "1KiB", f"--set=init.precision={precision}")
    assert run(file, *words) == 1
    text = capsys.readouterr().out
    assert "shard: 2" in text
    assert ("param_dtype: bfloat16" in text) == is_half


def test_what_cannot_be_split_is_said_if_nothing_fits(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--devices", "2", "--memory", "1KiB")
    assert run(file, *words, "--set=init.backend.find_unused_parameters=true") == 1
    assert "Not possible: " in capsys.readouterr().out
