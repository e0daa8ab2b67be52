"""Users of Redis: two a host, limited to its own keys, and two of the control worker's.

The database says who should exist and Redis is made to agree: at once when a host enrols,
rotates or is locked out, and again by ``sync`` after whatever befell Redis. Only digests of
secrets are kept here and there.
"""

import contextlib
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis
import structlog
from django.conf import settings

from runners.redis_address import key_prefix, shipper_user, with_user, worker_user
from webapp.core import broker
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, Host

log = structlog.get_logger(__name__)
HOST_USER = re.compile(r"[hs]_[0-9A-Z]{26}")  # nobody else's users are touched
SETINFO_SINCE = (7, 2)  # an older server refuses the whole rule that names it
NO_RIGHT = (
    "The user in REDIS_URL may not make users ({cause}), so hosts work over HTTPS alone. Give it "
    "+acl and +client|kill, or leave REDIS_URL out for Slipway's own Redis."
)
# Each set was found by running the real thing until Redis denied nothing (ACL LOG).
SPEAK = ("-@all", "+ping", "+hello")
QUEUE_WORKER = (
    *SPEAK, "+select", "+time", "+multi", "+exec", "+discard", "+watch", "+unwatch",
    "+lpush", "+rpush", "+brpop", "+llen", "+hset", "+hget", "+hdel",
    "+zadd", "+zrem", "+zrange", "+zscore", "+zrangebyscore",
    "+sadd", "+srem", "+scard", "+smembers", "+set", "+get", "+del", "+exists", "+pexpire",
    "+evalsha", "+eval", "+script|load", "+script|exists",
    "+psubscribe", "+punsubscribe", "+subscribe", "+unsubscribe",
)  # fmt: skip
SHIPPER = (*SPEAK, "+multi", "+exec", "+xadd", "+xlen", "+hget")
CONSUMER = (
    *SPEAK, "+multi", "+exec", "+xgroup|create", "+xreadgroup", "+xack", "+xdel", "+hset",
    "+blpop",
)  # fmt: skip
DISPATCHER = (
    *SPEAK, "+select", "+multi", "+exec", "+discard", "+watch", "+unwatch",
    "+lpush", "+llen", "+sadd", "+smembers",
)  # fmt: skip


class User(NamedTuple):
    """One Redis user: its name, the digest of its secret, its keys and what it may do there."""

    name: str
    digest: str
    keys: str
    commands: Sequence[str]
    channel: str = ""  # literal: a pattern would not match the worker's subscription

    def rule(self, extra: Iterable[str] = ()) -> list[str]:
        """Return the words of ACL SETUSER, which replace every earlier rule."""
        channels = [f"&{self.channel}"] if self.channel else []
        words = ["reset", "on", f"#{self.digest}", f"~{self.keys}", "resetchannels", *channels]
        return [*words, *self.commands, *extra]


def users_of(host: Host) -> list[User]:
    """Return the two users of a host; none while it has no credential or no secret."""
    if not host.redis_secret_hash or not host.credential_hash:
        return []
    prefix = key_prefix(host.pk)
    channel = f"{prefix}/0.celery.pidbox"
    digest = host.redis_secret_hash
    return [
        User(worker_user(host.pk), digest, f"{prefix}*", QUEUE_WORKER, channel),
        User(shipper_user(host.pk), digest, f"{prefix}*", SHIPPER),
    ]


def grant(host: Host) -> str:
    """Have Redis know a host's present secret, and no earlier one; return why it cannot.

    A Redis that is away is no reason: ``sync`` brings it up to date when it is back.
    """
    try:
        admin = broker.connection()
        _write(admin, users_of(host))
        _hang_up(admin, [user.name for user in users_of(host)])
        _save(admin)
    except redis.ResponseError as error:
        return NO_RIGHT.format(cause=error)
    except (redis.RedisError, OSError) as error:
        log.info("redis users wait", host=host.slug, cause=str(error))
    return ""


def withdraw(host: Host) -> None:
    """Have Redis forget a host and end its connections, now or as soon as Redis is back."""
    names = [worker_user(host.pk), shipper_user(host.pk)]
    try:
        admin = broker.connection()
        _ask(admin, "ACL", "DELUSER", *names)  # which ends their connections, too
        _save(admin)
    except (redis.RedisError, OSError) as error:
        log.info("redis users wait to be dropped", host=host.slug, cause=str(error))


def sync(*, rewrite: bool = False) -> int:
    """Make Redis agree with the database and return how many users were changed.

    ``rewrite`` writes every rule anew, for a version of Slipway that changed them.

    Raises:
        RedisError: Redis is away, or refuses.
    """
    admin = broker.connection()
    present = _present(admin)
    enrolled = (
        Host.objects.defer(*DOCUMENTS).filter(kind__in=RUNS_JOBS).exclude(redis_secret_hash="")
    )
    wanted = {user.name: user for user in _all_users(enrolled)}
    stale = [name for name in present if HOST_USER.fullmatch(name) and name not in wanted]
    changed = [user for name, user in wanted.items() if present.get(name) != {user.digest}]
    due = list(wanted.values()) if rewrite else changed
    if stale:
        _ask(admin, "ACL", "DELUSER", *stale)
    _write(admin, due)
    _hang_up(admin, [user.name for user in changed if user.name in present])
    if stale or due:
        _save(admin)
    return len(stale) + len(due)


def keep() -> int:
    """Do as ``sync``; a Redis that is away or refuses is no news every half minute."""
    try:
        return sync()
    except (redis.RedisError, OSError) as error:
        log.debug("redis users are not kept", cause=str(error))
        return 0


def provision() -> bool:
    """Write every rule and have this process's roles use users of their own, if Redis allows.

    Raises:
        RedisError: Redis is away.
    """
    try:
        sync(rewrite=True)
    except redis.ResponseError as error:
        log.warning("redis users cannot be made", cause=str(error))
        return False
    for role in (broker.CONSUMER, broker.DISPATCHER):
        broker.take_role(role, with_user(settings.REDIS_URL, role, _role_secret(role)))
    return True


def _all_users(hosts: Iterable[Host]) -> Iterator[User]:
    yield User(broker.CONSUMER, _digest(_role_secret(broker.CONSUMER)), "host:*", CONSUMER)
    yield User(broker.DISPATCHER, _digest(_role_secret(broker.DISPATCHER)), "host:*", DISPATCHER)
    for host in hosts:
        yield from users_of(host)


def _role_secret(role: str) -> str:
    """Return a secret that every process of this site can work out and nobody else."""
    text = f"redis-user:{role}".encode()
    return hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _present(admin: redis.Redis) -> Mapping[str, set[str]]:
    """Return the users that Redis has, with the digests of their secrets."""
    lines = [_text(line).split() for line in _ask(admin, "ACL", "LIST")]
    return {words[1]: {word[1:] for word in words if word.startswith("#")} for words in lines}


def _write(admin: redis.Redis, users: Sequence[User]) -> None:
    if not users:
        return
    extra = _extra(admin)
    pipe = admin.pipeline(transaction=False)
    for user in users:
        _ask(pipe, "ACL", "SETUSER", user.name, *user.rule(extra))
    pipe.execute()


def _extra(admin: redis.Redis) -> list[str]:
    """Return what clients send for courtesy, where the server knows it."""
    version = str(admin.info("server").get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return ["+client|setinfo"] if numbers >= SETINFO_SINCE else []


def _hang_up(admin: redis.Redis, names: Iterable[str]) -> None:
    """End the connections of users: a new secret alone leaves those open that know the old."""
    for name in names:
        _ask(admin, "CLIENT", "KILL", "USER", name)


def _ask(admin: redis.Redis, *words: str) -> Any:  # noqa: ANN401 (a reply of any shape)
    return admin.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py's own


def _save(admin: redis.Redis) -> None:
    """Keep the users over a restart; without an ACL file ``sync`` writes them again."""
    with contextlib.suppress(redis.ResponseError):
        _ask(admin, "ACL", "SAVE")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
