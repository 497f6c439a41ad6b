"""The device: hardware that is not driven here, and settings that mean nothing here."""

import pytest

from backends.cuda import CudaBackend
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import apply_overrides, parse_override
from modelzoo_trainer.config.positions import Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError

FILE = """\
trainer:
  init:
    backend: %s
    model: {name: fc_mnist, hidden_sizes: [4]}
    optimizer: {SGD: {}}
    %s
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""


@pytest.fixture(scope="module")
def shipped():
    return shipped_names()


def plan(shipped, backend, more="", *changes):
    root = read_text(FILE % (backend, more), "f.yaml")
    overrides = [parse_override(change) for change in changes]
    return check_config(apply_overrides(root, overrides), shipped)[0]


def problems(*args):
    with pytest.raises(ConfigError) as caught:
        plan(*args)
    return str(caught.value).splitlines()


CPU = ("init.device=cpu", "init.backend.backend_type=null")


@pytest.mark.parametrize("name", ["CSX", "csx"])
def test_hardware_that_is_not_driven_here_asks_for_a_device_in_one_line(shipped, name):
    (line,) = problems(shipped, f"{{backend_type: {name}, cluster_config: {{num_csx: 1}}}}")
    assert line == (
        f"f.yaml:3:29: trainer.init.backend.backend_type: '{name}' is hardware that this trainer "
        f"does not support. Use --device cpu, gpu or auto (the best device available)."
    )


def test_its_settings_have_no_effect_and_are_listed_once(shipped):
    backend = (
        "{backend_type: CSX, compile_dir: x, cluster_config: {num_csx: 2, mount_dirs: [a]}, "
        "csx.debug.implicit_cast_cb16_to_fp32: true}"
    )
    found = plan(shipped, backend, "", *CPU)
    assert found.init["device"] == "cpu"
    assert "backend" not in found.init
    assert [str(note) for note in found.notes] == [
        "f.yaml:3:97: trainer.init.backend.csx.debug.implicit_cast_cb16_to_fp32: no effect on "
        "this hardware.",
        "f.yaml:3:34: trainer.init.backend: compile_dir, cluster_config: no effect here "
        "(options of Cerebras hardware).",
    ]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("{compile_dri: x}", "3:15: trainer.init.backend.compile_dri: no such option. Did you"),
        (
            "{compile_dir: 3}",
            "3:28: trainer.init.backend.compile_dir: expected a string or null, got 3.",
        ),
        (
            "{cluster_config: {num_csxs: 1}}",
            "3:32: trainer.init.backend.cluster_config.num_csxs: no such argument of cluster_conf",
        ),
        (
            "{cluster_config: {num_csx: one}}",
            "3:41: trainer.init.backend.cluster_config.num_csx: expected an integer"
            " or null, got 'one'.",
        ),
        (
            "{csx.debug.implicit_cast_cb16_to_fp23: true}",
            "3:15: trainer.init.backend.csx.debug.implicit_cast_cb16_to_fp23: is not a flag. Did ",
        ),
    ],
)
def test_its_settings_are_checked_all_the_same(shipped, backend, message):
    (line,) = problems(shipped, backend, "", "init.device=cpu")
    assert line.startswith(f"f.yaml:{message}")


def test_its_precision_is_bfloat16_without_a_scaler_and_says_so(shipped):
    more = "precision: {fp16_type: cbfloat16, loss_scaling_factor: dynamic, precision_opt_level: 1}"
    found = plan(shipped, "{}", more, "init.device=cpu")
    assert [note.message for note in found.notes] == [
        "fp16_type cbfloat16 is bfloat16 here.",
        "precision_opt_level: no effect on this hardware.",
        "loss_scaling_factor: no effect with bfloat16, which needs no loss scaling.",
    ]
    assert found.init["precision"].make().scaler is None


def test_a_flag_in_the_callbacks_is_noted_or_refused_at_its_own_place(shipped):
    more = "callbacks: [{GlobalFlags: {csx.debug.execute_crd_memory_gi: %s}}]"
    (note,) = plan(shipped, "{}", more % "5", "init.device=cpu").notes
    assert note.message == "csx.debug.execute_crd_memory_gi: no effect on this hardware."
    (line,) = problems(shipped, "{}", more % "five", "init.device=cpu")
    assert line == (
        "f.yaml:6:32: trainer.init.callbacks[0].GlobalFlags.csx.debug.execute_crd_memory_gi is "
        "'five'; expected an integer."
    )


def test_a_device_beside_the_hardware_that_is_not_driven_here_is_taken(shipped):
    found = plan(shipped, "{backend_type: CSX, cluster_config: {num_csx: 1}}", "device: auto")
    assert found.init["device"] == "auto"


def test_a_device_that_is_not_on_this_machine_is_no_mistake_of_the_file(shipped, monkeypatch):
    monkeypatch.setattr(CudaBackend, "is_available", staticmethod(lambda: False))
    (line,) = problems(shipped, "{backend_type: GPU}")
    assert line.startswith("f.yaml:3:29: trainer.init.backend.backend_type: 'GPU' is not available")
    root = read_text(FILE % ("{backend_type: GPU}", ""), "f.yaml")
    (found,) = check_config(root, shipped, problems=Problems(for_a_run=False))
    assert "valid, but cannot run here: 'GPU' is not available" in str(found.notes[0])


def test_a_device_with_an_index_is_told_how_to_choose_it(shipped):
    for line in (
        *problems(shipped, "{backend_type: cuda:0}"),
        *problems(shipped, "{}", "device: cuda:0"),
        *problems(shipped, "{}", "", "init.device=cuda:0"),
    ):
        assert "'cuda:0'" in line
        assert "use device: cuda." in line
        assert "CUDA_VISIBLE_DEVICES=0" in line
