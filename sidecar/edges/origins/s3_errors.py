"""What S3 and botocore say when they say no, in the ports' few errors. Imported only together with botocore."""

from __future__ import annotations

from typing import Any

import urllib3
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError

from sidecar.model import Frozen
from sidecar.ports import OriginChanged, OriginDenied, OriginError

RAISED = (
    BotoCoreError,
    ClientError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
    ValueError,
    # From botocore's search for a bucket's region, when the endpoint answers every request with 301.
    RecursionError,
)
"""Everything that a boto3 call or the reading of its body may raise."""

# Answers below 500 that are about the moment, not about us.
_TRANSIENT_CODES = frozenset({"RequestTimeout", "Throttling", "ThrottlingException", "SlowDown", "OperationAborted"})
_NETWORK = (
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
    CredentialRetrievalError,
    MetadataRetrievalError,
    urllib3.exceptions.HTTPError,
    OSError,
)
_HINTS = {
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "ExpiredToken": "the credentials have expired",
    "InvalidAccessKeyId": "the server doesn't know this access key",
    "SignatureDoesNotMatch": "the secret key doesn't fit the access key",
    "InvalidObjectState": "the object is in an archive storage class and must be restored first",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
    "IllegalLocationConstraintException": "the bucket is in another region; set AWS_REGION",
}


class S3Failures(Frozen, frozen=True, kw_only=True):
    """Turns exceptions into errors that name who asked (`identity`), where, and the code; never a secret."""

    identity: str
    endpoint: str = "no endpoint yet"
    secrets: tuple[str, ...] = ()

    @classmethod
    def for_credentials(cls, credentials: Any, endpoint: str) -> S3Failures:
        """For what botocore's chain found; None means that requests go unsigned."""
        if credentials is None:
            return cls(identity="anonymous, since no AWS credentials were found", endpoint=endpoint)
        frozen = credentials.get_frozen_credentials()
        secrets = tuple(secret for secret in (frozen.secret_key, frozen.token) if secret)
        key = f"access key …{frozen.access_key[-4:]}" if len(frozen.access_key or "") >= 16 else "the access key"
        method = "the adapter's Secret" if credentials.method == "explicit" else credentials.method
        identity = f"{key} from {method}"
        return cls(identity=identity, endpoint=endpoint, secrets=secrets)

    def of(self, error: Exception, where: str, *, reading: bool = False) -> OriginError:
        """The error for anything in RAISED. `reading`: the object was listed before, so its absence is a change."""
        if isinstance(error, ClientError):
            return self._of_answer(error, where, reading)
        if isinstance(error, RecursionError):
            return OriginDenied(
                f"{where}: {self.endpoint} redirects every request; does it want https://, or another address?"
            )
        text = self._clean(f"{where} at {self.endpoint}: {type(error).__name__}: {error}")
        if isinstance(error, _NETWORK):
            return OriginError(text)
        if isinstance(error, ResponseParserError):
            return OriginError(f"{text} (is this an S3 endpoint?)")
        # No region, a broken configuration file, an endpoint that is no URL: nothing that time heals.
        return OriginDenied(text)

    def _of_answer(self, error: ClientError, where: str, reading: bool) -> OriginError:
        answer = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(answer.get("Code", status))
        message = str(answer.get("Message", ""))
        if status in (412, 416) or (reading and status == 404 and code != "NoSuchBucket"):
            return OriginChanged(f"{where} was changed since it was listed ({code})")
        said = " ".join(part for part in (code if code != str(status) else "", message) if part)
        text = f"{where} at {self.endpoint}: {status} {said}"
        if status >= 500 or status == 429 or status == 0 or code in _TRANSIENT_CODES:
            return OriginError(self._clean(text))
        if code in _HINTS:
            text += f"; {_HINTS[code]}"
        return OriginDenied(self._clean(f"{text} (asked as {self.identity})"))

    def _clean(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= 700 else text[:699] + "…"
