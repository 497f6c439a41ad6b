"""Errors of object stores in our words.

The errors of obstore repeat requests and answers, which may contain secrets: only status codes and
error codes are taken from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from modelzoo_trainer.checkpointing.stores.urls import StoreUrl

CREDENTIALS: Final = {
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, if temporary), or "
        "give the machine a role."
    ),
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account.",
    "az": (
        "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN),"
        " or give the machine an identity."
    ),
}
_CODE: Final = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_ATTEMPTS: Final = 3
_QUERY: Final = re.compile(r"\?\S*")


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request failed.

    Args:
        reason: What is wrong.
        advice: What to do; may be empty.
        is_temporary: Whether a later attempt may succeed.
        is_missing: Whether the bucket exists, but not the object.
        is_short: Whether the object is shorter than the range that was requested.
        attempts: How often an operation is tried where the same refusal also comes of a request
            that was damaged on the way, which may not happen again.
    """

    reason: str
    advice: str = ""
    is_temporary: bool = False
    is_missing: bool = False
    is_short: bool = False
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class _Rule:
    """Recognises a failure.

    Args:
        failure: The failure; `{bucket}` and `{credentials}` stand for the store's.
        codes: Error codes and numbers of statuses of S3, Google Cloud and Azure.
        kinds: Names of exceptions.
        texts: Parts of messages of obstore.
    """

    failure: RequestFailure
    codes: str = ""
    kinds: str = ""
    texts: tuple[str, ...] = ()

    def fits(self, error: Exception, text: str, codes: frozenset[str]) -> bool:
        """Return whether an error is of this kind."""
        return (
            not codes.isdisjoint(self.codes.split())
            or type(error).__name__ in self.kinds.split()
            or any(part in text for part in self.texts)
        )


_RULES: Final = (
    _Rule(
        RequestFailure("the bucket {bucket!r} does not exist", "Create it, or correct the URL."),
        "NoSuchBucket ContainerNotFound ContainerBeingDeleted InvalidBucketName",
    ),
    _Rule(
        RequestFailure("no credentials were found", "{credentials}"),
        texts=(
            "//169.254.",
            "//metadata",
            "InstanceMetadata",
            "MissingAccessKeyId",
            "MissingSecretAccessKey",
        ),
    ),
    _Rule(
        RequestFailure("the credentials have expired", "Renew them."),
        "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
    ),
    _Rule(
        RequestFailure("the clock of this machine differs from the store's", "Set the clock."),
        "RequestTimeTooSkewed RequestInTheFuture",
    ),
    _Rule(
        RequestFailure(
            "the credentials are not accepted",
            "They are wrong, or requests are changed on the way, as by a proxy. {credentials}",
            attempts=_ATTEMPTS,
        ),
        "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity NotSignedUp "
        "AuthenticationFailed InvalidAuthenticationInfo AuthenticationRequired "
        "NoAuthenticationInformation 401",
        "UnauthenticatedError",
    ),
    _Rule(
        RequestFailure(
            "the bucket is in another region or at another endpoint",
            "Set the option region (AWS_REGION) or endpoint (AWS_ENDPOINT_URL).",
        ),
        "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException "
        "TemporaryRedirect 301",
    ),
    _Rule(
        RequestFailure("the store has no space left", "Free space, or raise the quota."),
        "QuotaExceeded InsufficientStorage XMinioStorageFull InsufficientCapacity "
        "AccountQuotaExceeded StorageQuotaExceeded 507",
    ),
    _Rule(
        RequestFailure("data were damaged on the way to the store", is_temporary=True),
        "BadDigest InvalidDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch "
        "IncompleteBody Md5Mismatch Crc64Mismatch MissingContentLength",
    ),
    _Rule(
        RequestFailure("the store answered with an error", is_temporary=True),
        "SlowDown ServerBusy RequestTimeout OperationTimedOut InternalError ServiceUnavailable "
        "OperationAborted ConditionalRequestConflict Throttling ThrottlingException NoSuchUpload "
        "InvalidPart TooManyRequests RequestLimitExceeded 408 409 425 429 500 502 503 504",
    ),
    _Rule(RequestFailure("the store refused the request", is_temporary=True), "MalformedXML 400"),
    _Rule(
        RequestFailure("access is denied", "Grant reading, writing, listing and deleting objects."),
        "AccessDenied AllAccessDisabled AccountProblem AuthorizationFailure "
        "AuthorizationPermissionMismatch InsufficientAccountPermissions AccountIsDisabled "
        "Forbidden 403",
        "PermissionDeniedError",
    ),
    _Rule(
        RequestFailure("the object is shorter than expected", is_short=True),
        "InvalidRange 416",
        texts=("Invalid range",),
    ),
    _Rule(RequestFailure("there is no such object", is_missing=True), "404", "FileNotFoundError"),
    _Rule(
        RequestFailure(
            "the endpoint is not encrypted (http)", "Set the option allow_http to true."
        ),
        texts=("BadScheme",),
    ),
    _Rule(
        RequestFailure("the certificate of the endpoint is not trusted", "Set root_certificate."),
        texts=("invalid peer certificate", "UnknownIssuer"),
    ),
    _Rule(
        RequestFailure("the store did not answer in time", is_temporary=True),
        kinds="TimeoutError",
        texts=("kind: Timeout", "TimedOut", "operation timed out"),
    ),
    _Rule(
        RequestFailure(
            "the endpoint cannot be reached",
            "Check the network and the option endpoint.",
            is_temporary=True,
        ),
        texts=("kind: Connect", "dns error"),
    ),
    _Rule(
        RequestFailure("the connection was interrupted", is_temporary=True),
        texts=(
            "HTTP error",
            "invalid list response",
            "IncompleteMessage",
            "Interrupted",
            "error decoding",
            "error sending request",
            "kind: Body",
            "kind: Request",
        ),
    ),
)
"""In order: the first that fits."""


def classify(error: Exception, url: StoreUrl) -> RequestFailure:
    """Return why a request to a store failed."""
    text = str(error)
    codes = frozenset([*_CODE.findall(text), *_STATUS.findall(text)])
    for rule in _RULES:
        if rule.fits(error, text, codes):
            known = {"bucket": url.bucket, "credentials": CREDENTIALS.get(url.scheme, "")}
            reason = rule.failure.reason.format(**known)
            if codes and not rule.failure.is_missing:
                reason += f" ({', '.join(sorted(codes))})"
            return replace(rule.failure, reason=reason, advice=rule.failure.advice.format(**known))
    first = _QUERY.sub("", text.partition("\n")[0].partition("<")[0])[:200].strip(" -:")
    return RequestFailure(first or type(error).__name__)
