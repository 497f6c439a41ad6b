"""Find secrets among settings by their names and by the form of their values.

The same rule holds for everything that is printed, written, saved or sent: `check` and `plan`, the
saved `params.yaml`, checkpoints, loggers, the recorded command line, and messages.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from modelzoo_trainer.base.secret_forms import (
    DIGEST,
    ISSUED,
    LINES,
    OF_AZURE,
    PRIVATE_KEY,
    WEBHOOK,
)

HIDDEN: Final = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BETWEEN: Final = re.compile(r"[^a-z0-9]+")
_STEP: Final = re.compile(r"[.\[\]\"]+")

_MAY_BE_NUMBERS: Final = _words(
    "cred credential credentials creds password passwords passwd pwd passphrase passcode"
)
_WORDS: Final = _words(
    "accesskey accesstoken apikey apikeys authorization authtoken bearer connectionstring connstr "
    "cookie cookies cred credential credentials creds csrftoken jwt passcode passphrase passwd "
    "password passwords privatekey pwd sas secret secretkey secrets sessionid webhook "
    "webhooks sshpass"
)
"""Secrets by themselves, as the last part of a key."""
_AT_THE_END: Final = ("password", "passwd", "passphrase", "apikey", "secretkey", "accesskey")
"""Say so also at the end of a longer word: `PGPASSWORD`."""
_PAIRS: Final = frozenset(
    {("connection", "string"), ("conn", "string"), ("conn", "str")}
    | {("sas", last) for last in ("url", "uri")}
    | {("webhook", last) for last in ("url", "urls", "uri", "address", "endpoint")}
)
_ENDINGS: Final = _words("b64 backup base base64 dev hex json old pem prod string value")
"""May follow: `private_key_pem`; numbers may, too."""
_OF_TOKENS: Final = _words(
    "access api app auth aws azure bearer bot client csrf deploy discord gcp git github gitlab hf "
    "hub huggingface jwt login mlflow npm oauth private pypi refresh registry sas secret "
    "security service session slack telegram wandb webhook"
)
_OF_ONE_TOKEN: Final = _words("my push read upload write")
_OF_KEYS: Final = _words(
    "access account admin aes api auth decryption deploy encryption gpg hmac license master pgp "
    "private rsa secret signing ssh ssl subscription tls wandb"
)
_OF_FILES: Final = _words("ssh ssl tls")
"""Before `key`: a path is not the key itself."""
_OF_PASS: Final = _words(
    "admin api auth database db email ftp http login mail mongo mysql pg postgres proxy redis root "
    "server service smtp ssh user"
)
_OF_AUTH: Final = _words("api basic docker http https proxy redis rediscli registry smtp")
_OF_PAT: Final = _words("ado azure bitbucket databricks devops git github gitlab")
_OF_TEXT: Final = _words(
    "added additional append audio begin blank bos class cls count document drop end eos extra fim "
    "first image img input last mask max memory min new next num number oov output pad patch per "
    "prefix prepend prompt public sep separator sink sos source special start stop suffix target "
    "text total type unk video vocab word"
)
"""Mark the tokens of a text and the keys of a mapping, which are not secrets."""
_FLAGS: Final = _words("ask check has hide is max min no num require show use with")
_SCHEMES: Final = _words("anonymous basic bearer default digest iam kerberos none oauth")
_OF_PATTERNS: Final = re.compile(r"[][*?(){}|\\^$\s]")
_TEXT_TOKEN: Final = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_LIKE_RANDOM: Final = re.compile(r"[\w+=-]{16,}", re.ASCII)
_CHANGES: Final = re.compile(r"[0-9][A-Za-z]")  # a random text has many
_PATH: Final = re.compile(r"(?:~|\.{0,2})/[\w./~-]+")

# A user with a password, which may have an @ itself; or alone, as that may be a token.
_LOGIN: Final = re.compile(r"(?<=://)(?:[^/\s:@?#]*:(?![0-9]{1,5}[?#])[^/\s]+|[^/?#\s]+)(?=@)")
_OF_NO_LOGIN: Final = re.compile(r"(?:abfss?|wasbs?)://\Z")  # before the @ is a container
_PARAMETER: Final = re.compile(r"(?<=[?&;#])(?P<name>[\w.%~-]+)=(?P<value>[^&#;\s\"']+)")
_OF_ADDRESSES: Final = frozenset({"key", "sig", "signature", "x-amz-signature", "x-goog-signature"})
_VALUE: Final = r"(?P<value>\{[^{}]*\}|'[^']*'|\"[^\"]*\"|[^;,\s]+)"
_PLACEHOLDER: Final = re.compile(r"\{\w*\}|<[^<>]*>|\$[A-Z_]+|\$\{\w+\}|%\w+%|\*+")
_IN_CONNECTIONS: Final = (
    r"(?P<name>(?:^|(?<=[;,\s]))"
    r"(?:password|passwd|pwd|accountkey|sharedaccesskey|sharedaccesssignature)"
)
_ASSIGNED: Final = re.compile(rf"{_IN_CONNECTIONS}=){_VALUE}", re.IGNORECASE)
_ASSIGNED_AMONG_OTHERS: Final = re.compile(rf"{_IN_CONNECTIONS}\s*=\s*){_VALUE}", re.IGNORECASE)
_VARIABLE: Final = re.compile(  # of an environment, or an option of a command
    rf"(?<![\w$-])(?P<name>(?:[A-Z][A-Z0-9]*_[A-Z0-9_]*|--[\w-]+)=){_VALUE}"
)
_MEMBER: Final = re.compile(  # of a mapping in JSON
    r"(?P<name>\"[\w-]+\"\s*:\s*\")(?P<value>(?:[^\"\\]|\\.)+)(?=\")"
)
_HEADER: Final = re.compile(
    r"(?P<name>\b(?:authorization|api-key|cookie|(?:private|job|deploy)-token"
    r"|x-(?:auth|vault|access|api|amz-security)-token)[ \t]*:[ \t]*(?:(?:basic|bearer|token)[ \t]+"
    r"|(?=[\w.~+/=-]*[0-9])|(?=[\w.~+/=-]{12}))|\bbearer\s+(?=[\w.~+/=-]*[0-9])"
    r"(?=[\w.~+/=-]{12}))[\w.~+/=-]+",
    re.IGNORECASE,
)
_BASIC: Final = re.compile(  # also as Docker saves it
    r"(?P<name>\bbasic\s+|\"auth\"\s*:\s*\")(?P<value>[A-Za-z0-9+/]{4,}={0,2})", re.IGNORECASE
)
_STANDS_FOR: Final = re.compile(
    r"\A\*\*\*\Z|://\*\*\*@|[\w.%~-]=\*\*\*|\b(?:password|passwd|pwd|\w+key|signature)\s*=\s*\*\*\*"
    r"|\"\s*:\s*\"\*\*\*\"|\b(?:bearer|basic)\s+\*\*\*"
    r"|\b(?:authorization|api-key|cookie|[\w-]+-token)[ \t]*:[ \t]*(?:token[ \t]+)?\*\*\*"
    r"|\b(?:machine|default)\s(?:[^*]{0,400}\s)?password\s+\*\*\*|\bsshpass\s+-p\s*\*\*\*|:\*\*\*(?=\s|\Z)",
    re.IGNORECASE,
)
_STANDS_IN_ADDRESS: Final = re.compile(r"(?:/|/bot)\*\*\*")
_KEYS: Final = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*:")
_PARTS: Final = re.compile(r"[\[\]{},\s]+")
_CHANGE: Final = re.compile(r"(?P<path>[^=]+)=")
_SHORT: Final = 4  # characters; without quotes they could be part of anything
_LONGEST_QUOTED: Final = 57  # characters of a longer text that a message quotes


def is_secret(key: object, value: object = "") -> bool:
    """Return whether the value of a key is a secret: a text, or a list or mapping with one.

    `key`: as in the file; of a dotted one the last name counts. It is split where the case changes
    and at what is neither letter nor digit. `value`: null is not a secret, and a number is one only
    under a key such as `password`.
    """
    if not isinstance(key, str):
        return False
    return _is_named(key, value)


def _is_named(key: str, value: object, *, stands_alone: bool = True) -> bool:
    """Return whether a key names a secret; a lone word such as `token` only if it stands alone."""
    name = _CAMEL.sub("_", key.rpartition(".")[2]).lower()
    parts = [part for part in _BETWEEN.split(name) if part]
    while parts:
        is_known = stands_alone or parts[1:] or parts[0] in _WORDS
        if is_known and _is_telling(parts, value):
            return _holds_text(value) or (_holds_number(value) and _may_be_number(parts))
        stands_alone = False  # `token_1` is one of several
        without_number = parts[-1].rstrip("0123456789")
        if parts[-1] in _ENDINGS or not without_number:
            parts.pop()
        elif without_number != parts[-1]:
            parts[-1] = without_number
        else:
            break
    return False


def _is_telling(parts: list[str], value: object) -> bool:
    """Return whether a key that ends with these parts names a secret."""
    *others, last = parts
    before = others[-1] if others else ""
    match last:
        case "token" | "tokens":
            return _is_token(last, others, value)
        case "key" | "keys":
            if before in _OF_FILES and all(_PATH.fullmatch(text) for text in _texts(value)):
                return False
            is_other = not others or not _OF_TEXT.isdisjoint(others)
            return before in _OF_KEYS or (not is_other and _is_random(value))
        case "pass":
            return not others or before in _OF_PASS
        case "pat":
            is_pattern = any(_OF_PATTERNS.search(text) for text in _texts(value))
            return (not others or before in _OF_PAT) and not is_pattern
        case "auth":
            is_scheme = isinstance(value, str) and value.lower() in _SCHEMES
            return (not others or before in _OF_AUTH) and not is_scheme
    return last in _WORDS or last.endswith(_AT_THE_END) or (before, last) in _PAIRS


def _is_token(last: str, others: list[str], value: object) -> bool:
    if all(_TEXT_TOKEN.fullmatch(text) for text in _texts(value)):
        return False
    if not others or others[-1] in _OF_TOKENS:
        return True
    if last == "token" and others[-1] in _OF_ONE_TOKEN:
        return True
    is_of_text = not _OF_TEXT.isdisjoint(others)
    return not is_of_text and (not _OF_TOKENS.isdisjoint(others) or _is_random(value))


def _may_be_number(parts: list[str]) -> bool:
    return (parts[-1] in _MAY_BE_NUMBERS or parts[-1].endswith(_AT_THE_END[:3])) and parts[
        0
    ] not in _FLAGS


def _is_random(value: object) -> bool:
    return any(
        _LIKE_RANDOM.fullmatch(text) and len(_CHANGES.findall(text)) >= 3 for text in _texts(value)
    )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _texts(value: object) -> list[str]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, str)] or [""]


def _holds_text(value: object) -> bool:
    return any(leaf is not None and not isinstance(leaf, int | float) for leaf in _leaves(value))


def _holds_number(value: object) -> bool:
    return any(
        isinstance(leaf, int | float) and not isinstance(leaf, bool) for leaf in _leaves(value)
    )


def hide_in_text(text: str) -> str:
    """Return a text without what has the form of a secret: logins in addresses, issued tokens."""
    if PRIVATE_KEY.search(text):
        return HIDDEN
    if "://" in text:
        text = _LOGIN.sub(_hidden_login, text)
        text = _PARAMETER.sub(_hidden_parameter, text)
    for form in (WEBHOOK, _HEADER):
        text = form.sub(lambda found: found["name"] + HIDDEN, text)
    is_several = text.count("=") > 1
    text = (_ASSIGNED_AMONG_OTHERS if is_several else _ASSIGNED).sub(_hidden_assigned, text)
    text = _BASIC.sub(_hidden_basic, text)
    for form in (_VARIABLE, _MEMBER):
        text = form.sub(_hidden_value, text)
    for form in LINES:
        text = form.sub(_hidden_in_line, text)
    for form in (ISSUED, OF_AZURE, DIGEST):
        text = form.sub(HIDDEN, text)
    return text


def _hidden_login(found: re.Match[str]) -> str:
    is_user = ":" not in found[0]
    is_container = _OF_NO_LOGIN.search(found.string[: found.start()][-8:])
    return found[0] if is_user and (is_container or found[0] == "git") else HIDDEN


def _hidden_assigned(found: re.Match[str]) -> str:
    is_quoted = found.string[: found.start()].endswith(";")  # ODBC has {} for quotes
    is_shown = _PLACEHOLDER.fullmatch(found["value"]) and not is_quoted
    return found[0] if is_shown else found["name"] + HIDDEN


def _hidden_in_line(found: re.Match[str]) -> str:
    return found[0] if _PLACEHOLDER.fullmatch(found["value"]) else found["name"] + HIDDEN


def _hidden_parameter(found: re.Match[str]) -> str:
    name, value = unquote(found["name"]), found["value"]
    hide = name.lower() in _OF_ADDRESSES or is_secret(name, value)
    return f"{found['name']}={HIDDEN if hide else value}"


def _hidden_basic(found: re.Match[str]) -> str:
    """Hide what is a user and a password in base 64 (RFC 7617)."""
    try:
        is_login = b":" in b64decode(found["value"], validate=True)
    except ValueError:
        is_login = False
    return found["name"] + HIDDEN if is_login else found[0]


def _hidden_value(found: re.Match[str]) -> str:
    name, value = found["name"].strip('-"=: '), found["value"]
    is_option = found["name"].startswith("--")
    is_one = _is_named(name, 0 if value.isdecimal() else value, stands_alone=is_option)
    return found["name"] + HIDDEN if is_one and not _PLACEHOLDER.fullmatch(value) else found[0]


def without_secrets(plain: Any) -> Any:
    """Return a copy of plain values: without keys of secrets, and with those in texts hidden."""
    if isinstance(plain, dict):
        return {
            key: without_secrets(value) for key, value in plain.items() if not is_secret(key, value)
        }
    if isinstance(plain, list):
        return [without_secrets(item) for item in plain]
    return hide_in_text(plain) if isinstance(plain, str) else plain


def left_out(plain: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of what `without_secrets` removes, or hides in a text."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            inner = f"{path}.{key}" if path else str(key)
            if is_secret(key, value):
                yield inner, value
            else:
                yield from left_out(value, inner)
    elif isinstance(plain, list):
        for idx, item in enumerate(plain):
            yield from left_out(item, f"{path}[{idx}]")
    elif isinstance(plain, str) and hide_in_text(plain) != plain:
        yield path, plain


def stands_for_secret(value: object) -> bool:
    """Return whether a value is a placeholder that `without_secrets` leaves."""
    if not isinstance(value, str) or HIDDEN not in value:
        return False
    is_in_address = "://" in value and _STANDS_IN_ADDRESS.search(value)
    return bool(is_in_address or _STANDS_FOR.search(value))


def hiding(plain: Any) -> Callable[[str], str]:
    """Return a function that hides the secrets of a file in messages."""
    secrets = [str(leaf) for _, value in left_out(plain) for leaf in _leaves(value)]
    shown = {form for one in secrets for form in _quoted(one)}
    known = "|".join(re.escape(one) for one in sorted(shown, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{known})(?!\w)") if known else None

    def hide(text: str) -> str:
        return hide_in_text(text if pattern is None else pattern.sub(HIDDEN, text))

    return hide


def _quoted(secret: str) -> Iterator[str]:
    """Yield the forms in which messages quote it: whole, its beginning, or short in quotes."""
    for text in (secret, secret[:_LONGEST_QUOTED]):
        if len(text) < _SHORT:
            yield repr(text)
        else:
            yield from (text, repr(text)[1:-1])


def hide_in_command(words: Iterable[str]) -> list[str]:
    """Return the words of a command with secrets hidden.

    The word after an option such as `--api-key` is its value.
    """
    found: list[str] = []
    option = ""
    for word in words:
        is_value = bool(option) and not word.startswith("-") and "=" not in option
        is_secret_value = is_value and _is_option_of_secret(option, word)
        found.append(HIDDEN if is_secret_value else _hide_in_word(word))
        option = word if word.startswith("--") else ""
    return found


def _is_option_of_secret(option: str, value: str) -> bool:
    is_one = _is_named(option.strip("-"), 0 if value.isdecimal() else value)
    return is_one and not _PLACEHOLDER.fullmatch(value)


def _hide_in_word(word: str) -> str:
    change = _CHANGE.match(word)
    if change is None:
        return hide_in_text(word)
    path, value = change["path"], word[change.end() :]
    if path == "--set":
        return f"--set={_hide_in_word(value)}"
    parts = [part.strip("\"'") for part in _PARTS.split(value) if part]
    names = (*_STEP.split(path), *_KEYS.findall(value))
    if any(is_secret(name, parts) for name in names) or hide_in_text(value) == HIDDEN:
        return f"{path}={HIDDEN}"
    return hide_in_text(f"{path}={hide_in_text(value)}")
