"""ASGI middleware that serialises the requests of one credential.

Django handles each request in its own thread. A host that sends many requests at once would occupy
as many threads at the cost of other callers, without a gain of its own. The lock is held from the
end of the request body to the start of the response, so that neither a slow upload nor a long
download blocks the host's other requests.
"""

import asyncio
from collections.abc import Callable
from hashlib import sha256
from weakref import WeakValueDictionary

from webapp.core.asgi_messages import CLOSE, Application, Receive, Scope, Send
from webapp.core.problems import BusyProblem

MOST_UNANSWERED = 32  # requests per credential; a host's agent has four connections
RETRY_AFTER_SECONDS = 2


class CredentialLocks:
    """The lock and the number of open requests of one credential in one event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_unanswered = 0


class OneAtATime:
    """An application that handles one request at a time per credential."""

    def __init__(self, application: Application, policy: Callable[[Send], Send]) -> None:
        self._application, self._policy = application, policy  # policy: adds headers to a 429
        self._turns: WeakValueDictionary[tuple[int, bytes], CredentialLocks] = (
            WeakValueDictionary()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; a request without a credential needs no lock."""
        credential = _credential(scope)
        if not credential:
            await self._application(scope, receive, send)
            return
        key = (id(asyncio.get_running_loop()), sha256(credential).digest())
        turns = self._turns.setdefault(key, CredentialLocks())
        if turns.num_unanswered >= MOST_UNANSWERED:
            await _refuse(self._policy(send))
            return
        turn = _Turn(turns, receive, send)
        try:
            await self._application(scope, turn.receive, turn.send)
        finally:
            turn.end()


class _Turn:
    """One request: it holds the lock from the end of its body to the start of its response."""

    def __init__(self, turns: CredentialLocks, receive: Receive, send: Send) -> None:
        self._turns, self._receive, self._send = turns, receive, send
        self._is_held = self._is_over = False
        turns.num_unanswered += 1

    async def receive(self) -> Scope:
        """Return the next part of the body; acquire the lock before returning the last one."""
        message = await self._receive()
        if not message.get("more_body", False) and not self._is_held and not self._is_over:
            await self._turns.lock.acquire()
            self._is_held = True
        return message

    async def send(self, message: Scope) -> None:
        """Send a part of the response; the first one releases the lock."""
        self.end()
        await self._send(message)

    def end(self) -> None:
        """Release the lock for the next request of the credential."""
        if self._is_over:
            return
        if self._is_held:
            self._turns.lock.release()
        self._is_over = True
        self._turns.num_unanswered -= 1


def _credential(scope: Scope) -> bytes:
    return next(
        (bytes(value) for name, value in scope.get("headers", ()) if name == b"authorization"), b""
    )


async def _refuse(send: Send) -> None:
    from webapp.api.problems import send_problem

    sentence = (
        f"More than {MOST_UNANSWERED} requests with this credential wait for their answers. "
        "Send the next ones when some are answered."
    )
    problem = BusyProblem("too_many_at_once", sentence, retry_after_seconds=RETRY_AFTER_SECONDS)
    await send_problem(send, problem, CLOSE)
