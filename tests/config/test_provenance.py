"""The configuration that a run keeps: an input again, with its origin, without secrets."""

import re
import subprocess

import pytest

from modelzoo_trainer.base.secrets import hide_in_command, is_secret, without_secrets
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.config.provenance import describe_run, git_commit

FILE = """\
trainer:
  init:
    device: cpu
    model: {name: tiny_net, hidden_size: 3}
    optimizer: {AdamW: {lr: 1e-4}}
    callbacks: [{GlobalFlags: {api_key: uvw, pad_token_id: 3, hub_token: x, eos_token: "</s>"}}]
  fit:
    train_dataloader: {data_processor: Digits, batch_size: 2}
"""


def test_it_is_an_input_again(check):
    (plan,) = check(FILE)
    text = describe_run(plan, ["run.py", "--params", "my file.yaml"])
    (again,) = check(text)
    assert again.init["optimizer"].arguments == {"lr": 1e-4}
    assert again.resolved == without_secrets(plan.resolved)


def test_it_tells_its_origin(check):
    (plan,) = check(FILE)
    head = describe_run(plan, ["run.py", "--params", "my file.yaml"])
    assert re.search(r"^# command: run\.py --params 'my file\.yaml'$", head, re.MULTILINE)
    assert re.search(r"^# versions: Python 3\.\d+\.\d+, modelzoo-trainer .*torch \d", head, re.M)
    assert re.search(r"^# git commit: ([0-9a-f]{40}|none)", head, re.MULTILINE)


def test_it_holds_no_secret(check):
    (plan,) = check(FILE)
    command = ["run.py", "--set", "init.callbacks[GlobalFlags].api_key=uvw", "--set=hub_token=x"]
    text = describe_run(plan, command)
    assert "uvw" not in text  # no digits of a commit
    assert "hub_token=***" in text
    flags = to_plain(read_text(text, "f.yaml"))["trainer"]["init"]["callbacks"][0]["GlobalFlags"]
    assert flags == {"pad_token_id": 3, "eos_token": "</s>"}


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "api_key",
        "apiKey",
        "WANDB_API_KEY",
        "token",
        "hf_token",
        "smtp.passwd",
        "secret",
    ],
)
def test_a_telling_name_is_a_secret(key):
    assert is_secret(key, "text")


@pytest.mark.parametrize(
    "key",
    ["pad_token_id", "max_tokens", "eos_token", "token_dropout", "num_tokens", "key", "tokenizer"],
)
def test_tokens_of_text_are_none(key):
    assert not is_secret(key, "text")


def test_a_login_in_an_address_is_hidden():
    plain = {"uri": "https://me:pa@host:80/a", "bucket": "s3://b/a:b@c", "at": "me@host: a"}
    assert without_secrets(plain) == plain | {"uri": "https://***@host:80/a"}


def test_a_number_is_no_secret():
    assert not is_secret("token", 3)


def test_secrets_inside_a_value_on_the_command_line_are_hidden():
    words = [
        "init.loggers[0]={WandbLogger: {api_key: abc}}",
        'init.loggers=[{W: {"api_key": "a"}}]',
    ]
    words.append('init.loggers[W]."api_key"=abc')
    assert hide_in_command(["--set", *words, "plain"]) == [
        "--set",
        "init.loggers[0]=***",
        "init.loggers=***",
        'init.loggers[W]."api_key"=***',
        "plain",
    ]


def test_a_word_of_several_lines_stays_in_its_comment(check):
    (plan,) = check(FILE)
    text = describe_run(plan, ["run.py", "--set", "init.callbacks=[]\nfoo: 1"])
    assert check(text)


def test_a_commit_says_whether_there_are_changes(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(("git", *words), check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() == "none"
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    clean = git_commit()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "file").write_text("2")
    assert git_commit() == f"{clean} with uncommitted changes"


def _repository(folder, monkeypatch):
    """Make a repository with two commits in the current folder; return what calls git there."""

    def git(*words):
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(("git", *name, *words), check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
    git("init", "-q")
    (folder / ".gitattributes").write_text("file filter=own diff=own\n")
    (folder / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    return git


@pytest.mark.parametrize(
    "key",
    [
        *("core.fsmonitor", "core.pager", "core.sshCommand", "diff.external", "diff.own.command"),
        *("diff.own.textconv", "filter.own.clean", "filter.own.process", "pager.status"),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_git_runs_no_program_that_the_configuration_of_its_folder_names(key, tmp_path, monkeypatch):
    git = _repository(tmp_path, monkeypatch)
    git("config", key, f"touch {tmp_path}/ran #")
    (tmp_path / "file").write_text("2")
    assert "with uncommitted changes" in git_commit()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["own", "a=b"])
def test_a_filter_of_the_folder_is_named_but_not_run(name, tmp_path, monkeypatch):
    git = _repository(tmp_path, monkeypatch)
    (tmp_path / ".git/info/attributes").write_text(f"file filter={name}\n")
    with (tmp_path / ".git/config").open("a") as config:
        config.write(f'[filter "{name}"]\nclean = touch {tmp_path}/ran; cat\nrequired = true\n')
    commit = git("rev-parse", "HEAD")
    (tmp_path / "file").touch()
    assert (
        git_commit()
        == {
            "own": commit,
            "a=b": f"{commit} (files not compared: git filter 'filter.a=b')",
        }[name]
    )
    assert not (tmp_path / "ran").exists()


def test_git_runs_no_hook(tmp_path, monkeypatch):
    _repository(tmp_path, monkeypatch)
    for name in ("post-index-change", "fsmonitor-watchman"):
        hook = tmp_path / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        hook.chmod(0o755)
    (tmp_path / "file").touch()
    assert re.fullmatch("[0-9a-f]{40}", git_commit())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "url", ["ext::sh -c '>&2 touch ran'", "ssh://host.invalid/x", "file:///nowhere"]
)
def test_git_does_not_fetch_what_a_partial_clone_lacks(url, tmp_path, monkeypatch):
    git = _repository(tmp_path, monkeypatch)
    program = f"touch {tmp_path}/ran #"
    git("config", "core.repositoryFormatVersion", "1")
    git("config", "extensions.partialClone", "origin")
    git("config", "remote.origin.promisor", "true")
    git("config", "remote.origin.url", url)
    git("config", "remote.origin.uploadpack", program)
    git("config", "core.sshCommand", program)
    for transport in ("ext", "ssh", "file"):
        git("config", f"protocol.{transport}.allow", "always")
    tree = git("rev-parse", "HEAD^{tree}")
    (tmp_path / ".git/objects" / tree[:2] / tree[2:]).unlink()
    git_commit()
    assert not (tmp_path / "ran").exists()


def test_git_runs_nothing_inside_a_submodule(tmp_path, monkeypatch):
    git = _repository(tmp_path, monkeypatch)
    (tmp_path / "inner").mkdir()
    git("-C", "inner", "init", "-q")
    (tmp_path / "inner/file").write_text("1")
    git("-C", "inner", "add", ".")
    git("-C", "inner", "commit", "-qm", "one")
    git("add", "inner")
    git("commit", "-qm", "two")
    git("-C", "inner", "config", "filter.x.clean", f"touch {tmp_path}/ran; cat")
    (tmp_path / "inner/.git/info/attributes").write_text("file filter=x\n")
    (tmp_path / "inner/file").write_text("2")
    assert re.fullmatch("[0-9a-f]{40}", git_commit())
    assert not (tmp_path / "ran").exists()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_commit() == "none"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:pa@ss@host/a@b", "https://***@host/a@b"),
        ("https://sometoken@host", "https://***@host"),
        ("https://me:p?a#b@host", "https://***@host"),
        ("https://host/a?mail=me@there", "https://host/a?mail=me@there"),
        ("https://host?mail=me@there", "https://host?mail=me@there"),
    ],
)
def test_logins_in_addresses_are_hidden_in_files_and_commands(address, shown) -> None:
    assert without_secrets({"uri": [address]}) == {"uri": [shown]}
    words = [address, "--set", f"a.uri={address}", f"--set=a.uri={address}"]
    assert hide_in_command(words) == [shown, "--set", f"a.uri={shown}", f"--set=a.uri={shown}"]
