"""Epochs of a host, and its user in Redis."""

import contextlib
import hashlib
import hmac
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import kombu.transport.redis
import redis
import structlog
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import F
from django.dispatch import receiver
from redis.lock import Lock

from runners.shared.messages import EpochShown
from runners.shared.redis_address import key_prefix, shipper_user, with_user, worker_user
from webapp.accounts.models import AccessToken
from webapp.accounts.tokens import token_revoked
from webapp.audit.models import Event
from webapp.core import outages
from webapp.core.clock import now
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, EnrolmentToken, Epoch, Host
from webapp.hosts.pools import Refusal, refusals_record

# ---------------------------------------------------------------------------
# Redis ACL users: two per host, limited to its own keys, and two for the control worker.
#
# The database is authoritative. Redis is updated when a host enrols, rotates its secrets or is
# revoked, and by ``sync`` after Redis lost or changed users. Both store digests of secrets
# only.
# ---------------------------------------------------------------------------


log = structlog.get_logger(__name__)
HOST_USER = re.compile(r"[hs]_[0-9A-Z]{26}")  # other users are never touched
SETINFO_SINCE = (7, 2)  # older servers reject a rule that names "client|setinfo"
NO_RIGHT = (
    "The user in REDIS_URL may not create users ({cause}), so hosts work over HTTPS alone. Give "
    "it +acl, +client|kill and +script|load, or leave REDIS_URL out for Slipway's own Redis."
)
BUSY = "BUSY"  # error of a Redis that runs a script for longer than five seconds
SCANNED = 1000  # keys in one round trip
MAX_KEYS = 10_000  # of one host; an agent and its worker have about ten
MAX_KEYS_BYTES = 768 * 1024**2  # of one host; its stream alone may have 512 MiB
TOO_MUCH = (
    f"its keys in Redis are more than {MAX_KEYS:,} or hold more than "
    f"{MAX_KEYS_BYTES // 1024**2} MiB; they were deleted"
)
# What Celery's workers run in Redis: the release of a lock, and upkeep of their control queue. The
# site loads these scripts; a worker may run what is loaded, and load nothing.
WORKER_SCRIPTS = (
    Lock.LUA_RELEASE_SCRIPT,
    kombu.transport.redis.REFRESH_BINDING,  # type: ignore[attr-defined]  # newer than its stubs
    kombu.transport.redis.SWEEP_BINDINGS,  # type: ignore[attr-defined]
)
# Each set was determined by running the client until ACL LOG showed no denial.
SPEAK = ("-@all", "+ping", "+hello")
QUEUE_WORKER = (
    *SPEAK, "+select", "+time", "+multi", "+exec", "+discard", "+watch", "+unwatch",
    "+lpush", "+rpush", "+brpop", "+llen", "+hset", "+hget", "+hdel",
    "+zadd", "+zrem", "+zrange", "+zscore", "+zrangebyscore",
    "+sadd", "+srem", "+scard", "+smembers", "+set", "+get", "+del", "+exists", "+pexpire",
    "+evalsha", "+script|exists",
    "+psubscribe", "+punsubscribe", "+subscribe", "+unsubscribe",
)  # fmt: skip
SHIPPER = (*SPEAK, "+multi", "+exec", "+xadd", "+xlen", "+hget")
CONSUMER = (
    *SPEAK, "+multi", "+exec", "+xgroup|create", "+xreadgroup", "+xack", "+xdel", "+hset",
    "+blpop", "+llen", "+del", "+memory|usage",
)  # fmt: skip
DISPATCHER = (
    *SPEAK, "+select", "+multi", "+exec", "+discard", "+watch", "+unwatch",
    "+lpush", "+llen", "+sadd", "+smembers",
)  # fmt: skip


class User(NamedTuple):
    """One Redis user: name, digest of its secret, key pattern and allowed commands."""

    name: str
    digest: str
    keys: str
    commands: Sequence[str]
    channel: str = ""  # literal: a pattern would not match the worker's subscription

    def rule(self, extra: Iterable[str] = ()) -> list[str]:
        """Return the arguments of ACL SETUSER, which replace every earlier rule."""
        channels = [f"&{self.channel}"] if self.channel else []
        words = ["reset", "on", f"#{self.digest}", f"~{self.keys}", "resetchannels", *channels]
        return [*words, *self.commands, *extra]


def users_of(host: Host) -> list[User]:
    """Return the two users of a host; none if it has no credential or no Redis secret."""
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
    """Write a host's users with its current secret; return the error message or "".

    An unavailable Redis is not an error: ``sync`` updates it when it is back.
    """
    try:
        admin = outages.connection()
        _load(admin)
        _write(admin, users_of(host))
        _close_connections(admin, [user.name for user in users_of(host)])
        _save(admin)
    except redis.ResponseError as error:
        return NO_RIGHT.format(cause=error)
    except (redis.RedisError, OSError) as error:
        log.info("redis users wait", host=host.slug, cause=str(error))
    return ""


def withdraw(host: Host) -> None:
    """Delete a host's users and close their connections, now or once Redis is back."""
    names = [worker_user(host.pk), shipper_user(host.pk)]
    try:
        admin = outages.connection()
        _execute(admin, "ACL", "DELUSER", *names)  # also closes their connections
        _save(admin)
    except (redis.RedisError, OSError) as error:
        log.info("redis users wait to be dropped", host=host.slug, cause=str(error))


def sync(*, rewrite: bool = False) -> int:
    """Synchronise the Redis users with the database; return the number of changed users.

    ``rewrite`` writes every rule again, after an upgrade that changed them.

    Raises:
        RedisError: Redis is unavailable or rejects the command.
    """
    admin = outages.connection()
    _load(admin)
    # Users in Redis, with the digests of their secrets.
    lines = [_text(line).split() for line in _execute(admin, "ACL", "LIST")]
    present = {words[1]: {word[1:] for word in words if word.startswith("#")} for words in lines}
    enrolled = (
        Host.objects.defer(*DOCUMENTS).filter(kind__in=RUNS_JOBS).exclude(redis_secret_hash="")
    )
    expected = {user.name: user for user in _all_users(enrolled)}
    stale = [name for name in present if HOST_USER.fullmatch(name) and name not in expected]
    changed = [user for name, user in expected.items() if present.get(name) != {user.digest}]
    due = list(expected.values()) if rewrite else changed
    if stale:
        _execute(admin, "ACL", "DELUSER", *stale)
    _write(admin, due)
    _close_connections(admin, [user.name for user in changed if user.name in present])
    if stale or due:
        _save(admin)
    return len(stale) + len(due)


def load_scripts() -> None:
    """Load the workers' scripts, which a restarted Redis lacks: until then, no worker starts."""
    try:
        _load(outages.connection())
    except (redis.RedisError, OSError) as error:
        log.debug("the workers' scripts are not loaded", cause=str(error))


def keep() -> int:
    """Run ``sync``, and end what hosts do to Redis at the cost of others.

    An unavailable or refusing Redis is logged at debug level only.
    """
    try:
        # The user of an operator's own Redis may lack the right.
        with contextlib.suppress(redis.exceptions.NoPermissionError):
            delete_excess()
        return sync()
    except (redis.RedisError, OSError) as error:
        log.debug("redis users are not kept", cause=str(error))
        if str(error).startswith(BUSY):
            _kill_script()
        return 0


def _kill_script() -> None:
    """End a script that runs for seconds: an operator's own Redis may have other users."""
    with contextlib.suppress(redis.RedisError, OSError):
        _execute(outages.connection(), "SCRIPT", "KILL")
        log.warning("a script that held up Redis was ended")


def delete_excess() -> list[str]:
    """Delete all keys of hosts that fill Redis, which has no quotas; return the hosts' ids.

    No data is lost: a host sends again what was not acknowledged, meanwhile by HTTP.

    Raises:
        RedisError: Redis is unavailable or rejects the command.
    """
    admin = outages.connection()
    keys: dict[str, list[bytes]] = defaultdict(list)
    num_bytes: Counter[str] = Counter()
    found = admin.scan_iter(match=f"{key_prefix('*')}*", count=SCANNED)
    while some := list(islice(found, SCANNED)):
        with admin.pipeline(transaction=False) as pipe:
            for key in some:
                pipe.memory_usage(key)
            for key, size in zip(some, pipe.execute(), strict=True):
                host_id = _text(key).split(":")[1]
                keys[host_id].append(key)
                num_bytes[host_id] += size or 0
    excessive = [
        host_id
        for host_id, total in num_bytes.items()
        if total > MAX_KEYS_BYTES or len(keys[host_id]) > MAX_KEYS
    ]
    for host_id in excessive:
        for begin in range(0, len(keys[host_id]), SCANNED):
            admin.unlink(*keys[host_id][begin : begin + SCANNED])
        log.warning("a host's keys in Redis were deleted", host=host_id, num=len(keys[host_id]))
    for host_id in Host.objects.filter(pk__in=excessive).values_list("pk", flat=True):
        refusals_record(host_id, [Refusal("stream", TOO_MUCH)])
    return excessive


def provision() -> bool:
    """Write every rule and switch this process's roles to their own users, if Redis allows.

    Raises:
        RedisError: Redis is unavailable.
    """
    try:
        sync(rewrite=True)
    except redis.ResponseError as error:
        log.warning("redis users cannot be made", cause=str(error))
        return False
    for role in (outages.CONSUMER, outages.DISPATCHER):
        outages.take_role(role, with_user(settings.REDIS_URL, role, _role_secret(role)))
    return True


def _all_users(hosts: Iterable[Host]) -> Iterator[User]:
    yield User(outages.CONSUMER, _digest(_role_secret(outages.CONSUMER)), "host:*", CONSUMER)
    yield User(outages.DISPATCHER, _digest(_role_secret(outages.DISPATCHER)), "host:*", DISPATCHER)
    for host in hosts:
        yield from users_of(host)


def _role_secret(role: str) -> str:
    """Return a role's secret, derived from the site's secret key."""
    text = f"redis-user:{role}".encode()
    return hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _write(admin: redis.Redis, users: Sequence[User]) -> None:
    if not users:
        return
    extra = _setinfo_rule(admin)
    pipe = admin.pipeline(transaction=False)
    for user in users:
        _execute(pipe, "ACL", "SETUSER", user.name, *user.rule(extra))
    pipe.execute()


def _load(admin: redis.Redis) -> None:
    pipe = admin.pipeline(transaction=False)
    for script in WORKER_SCRIPTS:
        _execute(pipe, "SCRIPT", "LOAD", script)
    pipe.execute()


def _setinfo_rule(admin: redis.Redis) -> list[str]:
    """Return the rule for CLIENT SETINFO, if the server supports it."""
    version = str(admin.info("server").get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return ["+client|setinfo"] if numbers >= SETINFO_SINCE else []


def _close_connections(admin: redis.Redis, names: Iterable[str]) -> None:
    """Close the connections of users: a new secret leaves open connections untouched."""
    for name in names:
        _execute(admin, "CLIENT", "KILL", "USER", name)


def _execute(admin: redis.Redis, *words: str) -> Any:  # noqa: ANN401 (a reply of any shape)
    return admin.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py's own


def _save(admin: redis.Redis) -> None:
    """Save the users to the ACL file; without one, ``sync`` writes them after a restart."""
    with contextlib.suppress(redis.ResponseError):
        _execute(admin, "ACL", "SAVE")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---------------------------------------------------------------------------
# Detect a restored database: its hosts have seen a higher epoch than it contains.
#
# The epoch is a counter that rises with every revoked or replaced credential and with
# ``manage.py epoch raise``. Every heartbeat reply carries it to the host with an HMAC that only
# this site can make; every heartbeat returns the highest epoch that the host has seen. A higher
# epoch with a valid HMAC means that the database is older than that reply: no job is started until
# an operator raises the epoch. Hosts that never saw the highest epoch may have been revoked since
# the backup, so their credentials are ended.
# ---------------------------------------------------------------------------


RESTORED = (
    "This site was restored from a backup: its hosts have seen newer data. Nothing is "
    "started until an operator of the server runs `python3 manage.py epoch raise`."
)


def epoch() -> Epoch:
    """Return the site's epoch, created on first use."""
    return Epoch.objects.get_or_create(pk=1)[0]


def epoch_with_proof(number: int) -> EpochShown:
    """Return an epoch number with this site's HMAC as proof."""
    text = f"epoch:{number}".encode()
    proof = hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()
    return EpochShown(number=number, proof=proof)


def is_authentic(said: EpochShown) -> bool:
    """Return whether the proof of an epoch is this site's HMAC."""
    return hmac.compare_digest(epoch_with_proof(said.number).proof, said.proof)


def is_restored() -> bool:
    """Return whether a backup was restored: hosts have seen a higher epoch than it stores."""
    return Epoch.objects.filter(highest_seen__gt=F("number")).exists()


@receiver(token_revoked)
def epoch_advance(**_: object) -> None:
    """Increment the epoch after a credential of a host or an access token was revoked."""
    epoch()
    Epoch.objects.filter(pk=1).update(number=F("number") + 1)


def epochs_record(said: Iterable[EpochShown]) -> None:
    """Store the highest epoch that hosts have seen; log once when it exceeds the site's."""
    highest = max((each.number for each in said if is_authentic(each)), default=0)
    if highest <= epoch().number:
        return
    rows = Epoch.objects.filter(pk=1, highest_seen__lt=highest, number__lt=highest)
    if rows.update(highest_seen=highest):
        log.error("hosts have seen a higher epoch: this database is a backup", seen=highest)
        _record("site.restored", "system:beats", {"seen": highest})


def epoch_raise(*, by: str) -> list[Host]:
    """Raise the epoch after a restoration; return the hosts whose credentials were ended.

    Hosts that have not shown the highest epoch may have been revoked after the backup was made:
    they must enrol again. All sessions end, and unused enrolment tokens and all access tokens are
    revoked.
    """
    with transaction.atomic():
        site = Epoch.objects.select_for_update().get(pk=epoch().pk)
        is_backup = site.highest_seen > site.number
        ended = _end_credentials(site.highest_seen) if is_backup else []
        site.number = max(site.number, site.highest_seen) + 1
        site.highest_seen = 0
        site.save()
        detail = {"number": site.number, "hosts": [host.slug for host in ended][:100]}
        _record("site.epoch_raised", by, detail)
    for host in ended:
        withdraw(host)
    return ended


def _end_credentials(highest: int) -> list[Host]:
    outdated = list(Host.objects.exclude(credential_hash="").filter(epoch_seen__lt=highest))
    rows = Host.objects.filter(pk__in=[host.pk for host in outdated])
    rows.update(credential_hash="", command_salt="", redis_secret_hash="", rotation_asked_at=None)
    EnrolmentToken.objects.filter(used_at=None, revoked_at=None).update(revoked_at=now())
    AccessToken.objects.filter(revoked_at=None).update(revoked_at=now())
    Session.objects.all().delete()
    return outdated


def _record(kind: str, actor: str, detail: dict[str, object]) -> None:
    Event.objects.create(at=now(), team_id="", kind=kind, actor=actor[:80], detail=detail)
