"""Open the client of a store with obstore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from modelzoo_trainer.checkpointing.stores.failures import classify
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import ConfigError, suggest

_MEMORY: Final[dict[str, Any]] = {}
"""The store of each name of `memory://NAME`, which lives as long as the process."""
_SECRETS: Final = ("secret", "token", "password", "access_key", "account_key", "credential", "sas")
_NOT_SECRET: Final = frozenset({"token_file", "identity_token_file", "federated_token_file"})
_OF_CLIENT: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "http1_only",
        "http2_only",
        "proxy_excludes",
        "proxy_url",
        "root_certificate",
    }
)
_OF_LIMITS: Final = ("request_seconds", "retry_seconds")
_CONNECT_S: Final = 10
_RETRIES: Final = 3  # of one request; the callers try whole operations again


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits.

    Args:
        request_s: Of one request, which transfers at most one part of a file.
        retry_s: After the first failure of an operation, until the last attempt begins.
        attempts: Attempts of an operation; each repeats its requests, too.
        pause_s: Before the second attempt; doubles each time, up to 15 s.
    """

    request_s: float = 60
    retry_s: float = 120
    attempts: int = 6
    pause_s: float = 0.2


def import_obstore(url: StoreUrl) -> ModuleType:
    """Import obstore.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            f"{url} requires the package obstore ({error}). Install it: "
            f"pip install 'modelzoo-trainer[cloud]'"
        ) from None
    return obstore


def limits_of(options: Mapping[str, Any]) -> TimeLimits:
    """Return the time limits among the options of a store.

    Raises:
        ConfigError: If one is not a positive number.
    """
    given = {name: options[name] for name in _OF_LIMITS if options.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"options.{name}: expected a positive number, got {value!r}")
    default = TimeLimits()
    return TimeLimits(
        float(given.get("request_seconds", default.request_s)),
        float(given.get("retry_seconds", default.retry_s)),
    )


def is_plain(options: Mapping[str, Any]) -> bool:
    """Return whether the connection to a store is not encrypted."""
    return str(options.get("endpoint", "")).startswith("http://")


def open_client(
    api: ModuleType, url: StoreUrl, options: Mapping[str, Any], limits: TimeLimits
) -> Any:
    """Return the client of a bucket.

    Raises:
        ConfigError: If an option is unknown, invalid, or a secret.
    """
    known = {key: value for key, value in options.items() if key not in _OF_LIMITS}
    for key in known:
        _refuse_secret(key, known[key])
    if url.scheme == "memory":
        if known:
            raise ConfigError(f"options.{min(known)}: {url} has no options")
        return _MEMORY.setdefault(url.bucket, api.store.MemoryStore())
    of_client = {key: known.pop(key) for key in list(known) if key in _OF_CLIENT}
    if is_plain(known):
        of_client.setdefault("allow_http", True)
    keywords: dict[str, Any] = dict(known)
    if url.scheme == "s3":
        keywords.setdefault("checksum_algorithm", "SHA256")
    keywords["client_options"] = {
        "timeout": timedelta(seconds=limits.request_s),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, limits.request_s)),
        "user_agent": "modelzoo-trainer",
        **of_client,
    }
    keywords["retry_config"] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=min(limits.request_s, limits.retry_s)),
        "backoff": {
            "init_backoff": timedelta(seconds=0.2),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    kinds = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
    kind = getattr(api.store, kinds[url.scheme])
    try:
        return kind(url.bucket, **keywords)
    except (api.exceptions.BaseError, TypeError, ValueError) as error:
        raise ConfigError(_of_options(url, known, error)) from None


def _refuse_secret(key: str, value: Any) -> None:
    if any(part in key.lower() for part in _SECRETS) and not key.endswith(tuple(_NOT_SECRET)):
        raise ConfigError(
            f"options.{key}: credentials are not accepted in options, as these are saved with the "
            f"run. Set the environment variables of the store."
        )
    if isinstance(value, str) and "@" in value.partition("://")[2].partition("/")[0]:
        raise ConfigError(f"options.{key}: remove the user name and password from the URL")


def _of_options(url: StoreUrl, options: Mapping[str, Any], error: Exception) -> str:
    first = str(error).partition("\n")[0]
    unknown = [key for key in options if f"'{key}'" in first]
    if type(error).__name__ == "UnknownConfigurationKeyError" and unknown:
        names = [*_OF_CLIENT, *_OF_LIMITS, "endpoint", "region", "virtual_hosted_style_request"]
        return f"options.{unknown[0]}: no such option of {url}. {suggest(unknown[0], names)}"
    if "Account must be specified" in first:
        return f"{url}: the storage account is missing. Set AZURE_STORAGE_ACCOUNT_NAME."
    failure = classify(error, url)
    return f"{url} cannot be opened: {failure.reason}. {failure.advice}".strip()
