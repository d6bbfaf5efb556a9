"""HTTP to a vLLM server that somebody else runs: every wait has a limit, every error names the URL and the next step.

Needs httpx and nothing of vLLM. No proxy and no other setting of the environment is used, but for the API key.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 60.0
"""Longest wait for an answer that needs no generation to speak of."""
KEY_VARIABLE = "VIME_API_KEY"
"""No other: a key that was set for somebody else's service goes nowhere."""
MAX_QUOTED = 300


@dataclass(frozen=True, slots=True)
class Server:
    """``url`` without ``/v1`` and without credentials; ``timeout_seconds``: longest wait for one answer."""

    url: str
    timeout_seconds: float

    def client(self) -> httpx.AsyncClient:
        """A client of the running event loop, to be used with ``async with``: leaving it ends every connection."""
        import httpx

        key = os.environ.get(KEY_VARIABLE)
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            rule = "must be printable ASCII without spaces and line ends, and not empty"
            raise UsageError(f"{KEY_VARIABLE} in the environment {rule}", "set it again, or unset it")
        # No idle connection is kept: each is a socket, and the server may close it just when the next request goes out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, self.timeout_seconds)),
            verify=_certificates() if self.url.startswith("https:") else False,
            limits=limits,
            trust_env=False,
        )

    async def get(self, client: httpx.AsyncClient, path: str) -> Any:
        """The JSON at ``path``, within ``CONTROL_SECONDS``. VimeError as in ``post``."""
        return await self._request(client, "GET", path, None, min(CONTROL_SECONDS, self.timeout_seconds))

    async def post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to ``body``. VimeError where there is none, or the server refuses; its words are quoted."""
        return await self._request(client, "POST", path, body, self.timeout_seconds)

    async def _request(self, client: httpx.AsyncClient, method: str, path: str, body: Any, seconds: float) -> Any:
        import httpx

        where = f"{self.url}{path}"
        try:
            async with asyncio.timeout(seconds):  # httpx limits the wait for each piece of an answer, not for all of it
                response = await client.request(method, path, json=body)
        except httpx.ConnectError as error:
            hint = "start it (vllm serve MODEL --host HOST --port PORT), or correct rollout.engines"
            raise VimeError(f"{self.url}: no server answers there ({error})", hint) from error
        except httpx.ConnectTimeout as error:
            hint = "check host, port and firewall of rollout.engines"
            limit = min(CONNECT_SECONDS, self.timeout_seconds)
            raise VimeError(f"{self.url}: no connection within {limit:g} s", hint) from error
        except TimeoutError as error:
            hint = "see the server's log; rollout.timeout_seconds is the limit of a generation"
            raise VimeError(f"{where} did not answer within {seconds:g} s", hint) from error
        except httpx.HTTPError as error:
            hint = "see the server's log: it ended, or cut the connection"
            raise VimeError(f"{where}: {type(error).__name__}: {error}", hint) from error
        if response.status_code != 200:
            raise VimeError(f"{where} answered {response.status_code}: {quoted(response.text)}", _hint(response))
        try:
            return response.json()
        except ValueError as error:
            hint = "rollout.engines must name OpenAI-compatible vLLM servers"
            raise VimeError(f"{where} answered no JSON: {quoted(response.text)}", hint) from error


def quoted(text: str) -> str:
    """What the server said, on one line; the message alone where it is an error object."""
    try:
        found = json.loads(text)
        text = found["error"]["message"] if "error" in found else found["detail"]
    except (ValueError, TypeError, KeyError):
        pass  # not in the form of an error object: quoted as it is
    line = " ".join(str(text).split())
    return repr(line if len(line) <= MAX_QUOTED else line[:MAX_QUOTED] + "...")


def _hint(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return f"set {KEY_VARIABLE} in the environment to the server's API key (vllm serve --api-key)"
    if response.status_code == 404:
        return "rollout.engines takes vLLM servers, by the address without a path: http://HOST:PORT, not .../v1"
    if response.status_code >= 500:
        return "see the server's log"
    return "the server refuses the request; its limits and options are set where it was started"


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
