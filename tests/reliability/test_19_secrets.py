"""Secrets of a configuration: in no file that a run leaves behind, and in no message of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelzoo_trainer import Callback
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.tools.report import page as page_module
from tests.secret_kinds import BODY, IN_TEXTS, KINDS, ORDINARY

TRUE = [
    *("password", "api_key", "apiKey", "hub_token", "hf_token", "auth_token", "access_token"),
    *("secret", "client_secret", "secret_key", "private_key", "credentials", "authorization"),
    *("wandb_key", "db_passwd", "passphrase", "bearer_token", "session-token", "refreshToken"),
    *("github_token", "signing_key", "private_key_pem", "credentials_json", "connection_string"),
    *("passcode", "pass", "pat", "sas", "cookie", "auth", "tokens", "webhook", "webhook_url"),
]
LOOK_ALIKES = [
    *("pad_token_id", "max_tokens", "eos_token", "use_cls_token", "num_memory_tokens", "key"),
    *("tokenizer", "token_type", "key_value_heads", "passes", "secretary", "num_keys", "monkey"),
    *(
        "pass_through",
        "path",
        "pattern",
        "compass",
        "bypass",
        "author",
        "key_dim",
        "token_type_ids",
    ),
]
VALUE = "sk-4f9a8c1e2b7d6053"
FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: out
    model: {{name: fc_mnist, hidden_sizes: [4], input_size: 64}}
    optimizer: {{AdamW: {{}}}}
    schedulers:
      - CosineDecayLR: {{initial_learning_rate: 0.01, end_learning_rate: 0.0, total_iters: 2}}
    loop: {{max_steps: 2, eval_frequency: 1}}
    checkpoint: {{steps: 1}}
    callbacks:
      - tests.reliability.test_19_secrets.Holder: {{options: {{{options}}}}}
  fit:
    train_dataloader: {{data_processor: DigitsProcessor, batch_size: 64}}
    val_dataloader: {{data_processor: DigitsProcessor, split: val, batch_size: 90}}
"""


class Holder(Callback):
    """A callback with settings, which it logs."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def on_fit_start(self, trainer, *args, **kwargs) -> None:
        for value in self.options.get("first", {}).values():
            trainer.logger.info("with %s", value)
        if "refused" in self.options:
            kind = ConfigError if self.options["refused"] == "refused" else CheckpointError
            raise kind(f"it got {self.options['value']}")


def left_behind(folder) -> dict[str, str]:
    """Return everything that a run wrote, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("names", [TRUE, LOOK_ALIKES], ids=["secrets", "look_alikes"])
def test_a_run_writes_and_says_no_secret_and_leaves_nothing_else_out(
    tmp_path, monkeypatch, capfd, caplog, count, names
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {name: f"{VALUE}{number:02}" for number, name in enumerate(names)}
    options = ", ".join(f"{name}: {value}" for name, value in values.items())
    (tmp_path / "params.yaml").write_text(FILE.format(options=options), encoding="utf-8")
    change = (
        "init.callbacks[tests.reliability.test_19_secrets.Holder].options.api_key=" + VALUE + "99"
    )
    assert main(["--params", "params.yaml", "--set", change]) == 0
    texts = left_behind(tmp_path / "out")
    texts["output"] = "".join(capfd.readouterr())
    texts["log"] = caplog.text
    kept = next(text for path, text in texts.items() if path.endswith("params.yaml"))
    shown = [name for name, value in values.items() if value in kept]
    leaks = [(p, v) for p, text in texts.items() for v in [VALUE + "99"] if v in text]
    if names is TRUE:
        leaks += [
            (path, name) for path, text in texts.items() for name in values if values[name] in text
        ]
    count(
        settings=len(names) + 1,
        leaks=len(leaks),
        wrongly_hidden=0 if names is TRUE else len(names) - len(shown),
    )
    assert leaks == []
    assert shown == ([] if names is TRUE else list(values))


SETTINGS = [*KINDS.values(), *IN_TEXTS.values()]
LOGGED = """\
    loggers:
      - JsonlLogger: {}
      - MLflowLogger: {tracking_uri: mlflow}
"""


def test_no_secret_by_its_form_is_in_any_file_of_a_run(tmp_path, monkeypatch, count) -> None:
    with warnings.catch_warnings(action="ignore"):  # of its own imports
        pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    options = json.dumps({f"s{number}": text for number, text in enumerate(SETTINGS)})
    shown = json.dumps({f"o{number}": text for number, text in enumerate(ORDINARY)})
    file = FILE.format(options=f"first: {options}, ordinary: {shown}")
    file = file.replace("  fit:\n", LOGGED + "  fit:\n")
    Path("params.yaml").write_text(file, encoding="utf-8")
    assert main(["--params", "params.yaml"]) == 0
    monkeypatch.setattr(page_module, "plotly_js", lambda: "")
    assert main(["report", "out", "-o", "out/report.html"]) == 0
    texts = left_behind(tmp_path / "out") | left_behind(tmp_path / "mlflow")
    assert {"report.html"} <= set(texts)
    assert any("params" in path for path in left_behind(tmp_path / "mlflow"))
    secrets = [*KINDS.values(), BODY]
    leaks = [(path, one) for path, text in texts.items() for one in secrets if one in text]
    kept = next(text for path, text in texts.items() if path.endswith("params.yaml"))
    plain = yaml.safe_load(kept)["trainer"]["init"]["callbacks"][0]
    [own] = plain.values()
    hidden = [one for one in ORDINARY if one not in own["options"]["ordinary"].values()]
    count(settings=len(SETTINGS), leaks=len(leaks), wrongly_hidden=len(hidden))
    assert leaks == []
    assert hidden == []


@pytest.mark.parametrize(("error", "code"), [("refused", 2), ("failed", 1)])
def test_an_error_of_a_run_does_not_show_a_secret(
    tmp_path, monkeypatch, capfd, count, error, code
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = KINDS["DigitalOcean"]
    text = FILE.format(options=f"refused: {error}, value: {secret}")
    Path("params.yaml").write_text(text, encoding="utf-8")
    assert main(["--params", "params.yaml"]) == code
    printed = "".join(capfd.readouterr())
    assert "it got ***" in printed
    assert secret not in printed
    count(settings=1, leaks=0)


def test_a_mistake_in_a_file_does_not_show_its_secrets(tmp_path, monkeypatch, capfd, count) -> None:
    monkeypatch.chdir(tmp_path)
    options = f"api_key: {VALUE}"
    text = FILE.format(options=options).replace("max_steps: 2", "max_stepz: 2")
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    assert main(["--params", "params.yaml"]) == 2
    assert VALUE not in "".join(capfd.readouterr())
    count(settings=1, leaks=0)
