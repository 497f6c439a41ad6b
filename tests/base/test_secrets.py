"""Which settings are secrets, and that none of them is shown."""

from __future__ import annotations

import pytest
import yaml

from modelzoo_trainer.base.secrets import (
    hide_in_command,
    hide_in_text,
    is_secret,
    left_out,
    stands_for_secret,
    without_secrets,
)
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import parse_override
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.config.provenance import describe_run
from modelzoo_trainer.config.published import published_names, published_schema
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.compat.corpus_here import CONFIGURATIONS

SECRETS = """
    github_token signing_key private_key_pem credentials_json connection_string passcode pass pat
    sas cookie webhook webhook_url slack_webhook_url db_pass APIKey X-Api-Key Set-Cookie auth
    GitHubToken oauth_token account_key conn_str github_pat clientSecret secrets jwt session_token
    smtpPassword sessionid Authorization hf_token wandb_api_key token tokens api_tokens
"""
LOOK_ALIKES = """
    max_tokens num_tokens tokenizer pad_token eos_token eos_token_id key_dim keys key pass_through
    path pattern compass bypass passes passed author token_type_ids use_token_type forward_pass
    low_pass image_key caption_key public_key sort_key password_file secret_name auth_type pat_len
    stop_tokens special_tokens additional_special_tokens video_token fim_prefix_token id_token
    patience spatial sasquatch signature cookiecutter monkey tokens_per_sample pin_memory
"""


@pytest.mark.parametrize("key", SECRETS.split())
def test_a_key_is_judged_by_its_parts(key):
    assert is_secret(key, "text")
    assert is_secret(key, ["user", "x"])
    assert is_secret(key, {"user": "x"})


@pytest.mark.parametrize(
    "key",
    [
        *("password2", "access_token_2", "secret_key_base", "db_password_prod"),
        "my_token",
    ],
)
def test_a_key_may_end_with_a_number_or_a_place(key):
    assert is_secret(key, "text")
    assert not is_secret(key.replace("password", "token"), 3)


@pytest.mark.parametrize(
    "key", ["token_0", "tokens_dev", "pass_1", "auth0", "read_tokens", "pat_2"]
)
def test_a_lone_word_with_a_number_or_a_place_is_none(key):
    assert not is_secret(key, "text")


@pytest.mark.parametrize("key", LOOK_ALIKES.split())
def test_a_key_with_such_a_word_inside_another_is_none(key):
    assert not is_secret(key, "text")
    assert not is_secret(key, ["a", "b"])


@pytest.mark.parametrize("key", ["token", "api_key", "secret", "auth", "tokens", "pat"])
@pytest.mark.parametrize("value", [3, 0.5, True, None, [], [1, 2], {"a": 1}])
def test_what_holds_no_text_is_none(key, value):
    assert not is_secret(key, value)


def test_numbers_are_secrets_under_keys_of_passwords_unless_the_key_is_a_question():
    assert is_secret("password", 1234)
    assert is_secret("db_passwd", 1234)
    assert not is_secret("use_password", True)
    assert not is_secret("pass", 1)
    assert is_secret("password", {"value": 1234})
    assert is_secret("credentials", {"pin": 1234})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tokens", ["<s>", "</s>", "[CLS]"]), ("auth", "basic"), ("pat", "*.weight")),
        *(("pat", "a|b"), ("bot_token", "<|bot|>"), ("api_tokens", ["<api>"])),
        *(("tls_key", "/etc/x.pem"), ("ssl_key", "~/x.pem")),
    ],
)
def test_a_value_that_cannot_be_one_is_none(key, value):
    assert not is_secret(key, value)


@pytest.mark.parametrize("key", ["acme_token", "datadog_key"])
def test_under_another_token_or_key_a_random_value_is_one(key):
    assert is_secret(key, "a1b2c3d4e5f6a7b8")
    assert not is_secret(key, "image-embedding-v2-large")


@pytest.mark.slow
def test_a_long_value_is_judged_at_once():
    assert not is_secret("x_key", "1" + "a" * 100_000 + "1" + "a" * 100_000)
    odd = ("://", "://a/", "://a@", "s3://b/x,", "a.b", "eyJaaaaaaaa.", ";a=", "A_B=", '"a":"')
    for text in (part * (100_000 // len(part)) for part in odd):
        assert hide_in_text(text + "***")
        assert not stands_for_secret(text)
        assert hide_in_command([f"a={text}"])
    assert hide_in_text("A_TOKEN=" + "1" * 5_000)


PEM = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/a?token=abc&b=1", "https://h/a?token=***&b=1"),
        ("https://h/a?b=1&access_token=abc#c", "https://h/a?b=1&access_token=***#c"),
        ("https://h/a?sv=1&sig=ab%3D", "https://h/a?sv=1&sig=***"),
        ("https://u:p@h/a", "https://***@h/a"),
        ("see https://u:p@h, or not", "see https://***@h, or not"),
        ("Server=h;Password=abc;Database=d", "Server=h;Password=***;Database=d"),
        ("A=b;AccountKey=ab/c==;C=d", "A=b;AccountKey=***;C=d"),
        ("Server=h;Password = abc;Database=d", "Server=h;Password = ***;Database=d"),
        ("Password='two words';User=u", "Password=***;User=u"),
        ("Bearer abcdefghij12", "Bearer ***"),
        ("Basic dXNlcjpwYXNz", "Basic ***"),
        ("Authorization: Bearer short", "Authorization: Bearer ***"),
        ("authorization:a1b2", "authorization:***"),
        ("authorization: token abc", "authorization: token ***"),
        ("X-Api-Key: a1b2", "X-Api-Key: ***"),
        ("export WANDB_API_KEY=short", "export WANDB_API_KEY=***"),
        ("WANDB_API_KEY='two words'", "WANDB_API_KEY=***"),
        ("Driver=x;UID=sa;PWD={my;pass}", "Driver=x;UID=sa;PWD=***"),
        ("Server=h;Password=$ecret1;D=x", "Server=h;Password=***;D=x"),
        ("host=localhost password = abc", "host=localhost password = ***"),
        ("abfss://user:pw@h", "abfss://***@h"),
        ("--password=short", "--password=***"),
        ('{"password": "short", "a": "b"}', '{"password": "***", "a": "b"}'),
        ("https://h/a?api%5Fkey=abc", "https://h/a?api%5Fkey=***"),
        ("https://hooks.zapier.com/hooks/catch/1", "https://hooks.zapier.com/hooks/***"),
        ("https://api.telegram.org/bot1:a/send", "https://api.telegram.org/bot***"),
        ("https://hooks.slack.com/services/T0/B0/x", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/1/x", "https://discord.com/api/webhooks/***"),
        ("ghp_" + "a1" * 18, "***"),
        ("hf_" + "aB" * 17, "***"),
        ("use AKIA" + "A1" * 8 + " here", "use *** here"),
        (PEM, "***"),
    ],
)
def test_a_value_is_judged_by_its_form(text, shown):
    assert hide_in_text(text) == shown
    assert without_secrets({"a": [text]}) == {"a": [shown]}
    assert hide_in_command([f"a.b={text}"]) in ([f"a.b={shown}"], ["a.b=***"])
    assert stands_for_secret(shown) or shown.startswith("use")


@pytest.mark.parametrize(
    "text",
    [
        *("https://h/a?mail=me@there&page=2", "s3://bucket/data", "basic transformers", "*.weight"),
        *("sk-learn-regression-baseline-2", "a=b", "layers.*.attn", "tokens=3", "https://h/key/x"),
        *("abfss://data@acct.dfs.core.windows.net/train", "ssh://git@github.com/x/y.git"),
        *("http://host:80?mail=me@there", "basic llama-3.1-8b-instruct", "TOKENS=3", "PATH=/bin"),
        *("Enter your password = yes", "Basic understanding123456", "PASSWORD={password}"),
        *("Explain authorization: how it works", "Authorization:\n\nnext paragraph", "PASS=ok"),
        *("https://outlook.office.com/mail/inbox", "https://api.telegram.org/bots"),
        *("# *** heading", "a: *** b", '{"password": "<password>"}'),
        *("<|endoftext|>", "model-00001-of-00002", "hf_internal", "A bearer of 12 names", "**"),
    ],
)
def test_other_texts_stay_as_they_are(text):
    assert hide_in_text(text) == text
    assert not stands_for_secret(text)


def test_an_address_in_a_command_may_have_several_parameters():
    assert hide_in_command(["https://h/a?b=1&token=abc"]) == ["https://h/a?b=1&token=***"]


def test_no_argument_of_what_is_shipped_or_published_is_a_secret():
    names = shipped_names()
    kinds = ("models", "optimizers", "schedulers", "callbacks", "loggers", "processors")
    tables = [getattr(names, kind) for kind in kinds]
    schemas = [schema_of(table.load(name)) for table in tables for name in table.names]
    schemas += [schema_of(section) for section in names.sections.values()]
    for kind in ("model", "data processor", "callback"):
        schemas += [published_schema(kind, name) for name in published_names(kind)]
    hidden = {key for schema in schemas for key in schema.parameters if is_secret(key, "text")}
    assert hidden == set()


@pytest.mark.corpus
def test_nothing_in_the_published_configurations_is_hidden():
    paths = sorted(CONFIGURATIONS.rglob("*.yaml"))
    plain = {str(path): to_plain(read_text(path.read_text(), str(path))) for path in paths}
    assert paths
    assert {name: list(left_out(one)) for name, one in plain.items() if list(left_out(one))} == {}


FILE = """\
trainer:
  init:
    device: cpu
    model: {name: tiny_net, hidden_size: 3}
    optimizer: {AdamW: {lr: 1e-4}}
    callbacks:
      - GlobalFlags: {github_token: abcdef, uri: "https://me:pa@host/a", ok: shown}
  fit:
    train_dataloader: {data_processor: Digits, batch_size: 2}
"""


def test_a_kept_file_names_what_was_left_out(check):
    (plan,) = check(FILE)
    text = describe_run(plan, ["run.py"])
    assert "abcdef" not in text
    assert "me:pa" not in text
    place = "trainer.init.callbacks[0].GlobalFlags"
    comments = [line for line in text.splitlines() if line.startswith("# removed")]
    assert [line.rpartition(" ")[2] for line in comments] == [
        f"{place}.github_token",
        f"{place}.uri",
    ]


def test_a_kept_file_does_not_run_with_what_stands_for_a_secret(check, complaints):
    (plan,) = check(FILE)
    (line,) = complaints(describe_run(plan, ["run.py"]))
    assert "trainer.init.callbacks[0].GlobalFlags.uri: contains *** in place of a secret" in line
    assert "--set" in line
    assert check(yaml.safe_dump(without_secrets(plan.resolved)).replace("***", "me:pa"))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("model: {name: tiny_net, hidden_size: 3}", "model: {name: tiny_net, hidden_size: sEcReT}"),
        ("lr: 1e-4", "lr: https://me:sEcReT@host"),
        ("lr: 1e-4", "token: sEcReT"),
        ("ok: shown", "password: sEcReT}, AdamW: {sEcReT: 3"),
    ],
)
def test_a_message_does_not_show_what_is_hidden_elsewhere(complaints, line, wrong):
    text = FILE.replace("abcdef", "sEcReT").replace(line, wrong)
    lines = complaints(text)
    assert lines
    assert "sEcReT" not in "\n".join(lines)


def test_a_long_secret_is_not_shown_in_part(complaints):
    secret = "sEcReT" * 20
    text = FILE.replace("abcdef", secret).replace("1e-4", secret)
    (line,) = complaints(text)
    assert "sEcReT" not in line


def test_a_change_that_is_refused_is_not_shown_with_its_secret():
    with pytest.raises(ConfigError) as caught:
        parse_override("a b.api_key=sEcReT")
    assert "sEcReT" not in str(caught.value)


SHIPPED = """\
trainer:
  init:
    device: cpu
    model_dir: {folder}
    model: {{name: fc_mnist, hidden_sizes: [4], input_size: 64}}
    loggers: [{{MLflowLogger: {{tracking_uri: "https://me:sEcReT@host/x?token=sEcReT"}}}}]
    callbacks: [{{GlobalFlags: {{csx.tokens: [sEcReT], csx.signing_key: sEcReT}}}}]
  validate:
    ckpt_path: https://me:sEcReT@host/ckpt
    val_dataloader: {{data_processor: DigitsProcessor, split: val, batch_size: 90}}
"""


def test_a_check_prints_no_secret(tmp_path, capfd):
    path = tmp_path / "params.yaml"
    path.write_text(SHIPPED.format(folder=tmp_path / "out"))
    assert (
        main(["--params", str(path), "--check", "--explain-hooks"]) == 2
    )  # ckpt_path does not exist
    printed = "".join(capfd.readouterr())
    assert "https://***@host/x?token=***" in printed
    assert "sEcReT" not in printed
