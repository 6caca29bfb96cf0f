"""What clients have of what they may have: sequences that run, and rates."""

from dataclasses import dataclass

from moebius_gateway.admission.bucket import Bucket
from moebius_gateway.admission.limits import Client, ClientLimits


@dataclass(slots=True)
class Account:
    """One client's. A bucket is None where there is no limit."""

    limits: ClientLimits
    running: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None

    @property
    def full(self) -> bool:
        """It has as many sequences as it may have."""
        return self.limits.max_concurrent is not None and self.running >= self.limits.max_concurrent

    def limit(self, limits: ClientLimits, now: float) -> None:
        """Takes on limits that were changed; what was used stays used."""
        self.limits = limits
        self.requests = _bucket(self.requests, limits.requests_per_minute, now)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now)


def _bucket(bucket: Bucket | None, per_minute: float | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket.per_minute(per_minute, now) if bucket is None else bucket.resized(per_minute, now)


class Accounts:
    """One for each name of an API key that was used; they outlive changes of the key's limits."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def of(self, client: Client, now: float) -> Account:
        """With the limits that the client has now."""
        account = self.named(client.name)
        if account.limits != client.limits:
            account.limit(client.limits, now)
        return account

    def named(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account(ClientLimits()))
