"""vLLM's OpenAI-compatible server over the very engine that generates for the run, on loopback, in its event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from vime.debug.stop.hold import held
from vime.errors import VimeError

if TYPE_CHECKING:
    import uvicorn
    from vllm.v1.engine.async_llm import AsyncLLM

START_SECONDS = 60.0
CLOSE_SECONDS = 5.0


class OpenAiServer:
    """Serves until ``close``. ``url`` ends without ``/v1``."""

    def __init__(self, url: str, server: uvicorn.Server, task: asyncio.Task[None], sock: socket.socket) -> None:
        self.url = url
        self._server = server
        self._task = task
        self._socket = sock

    @classmethod
    async def start(cls, llm: AsyncLLM, model: str) -> OpenAiServer:
        """Listen on a free port of 127.0.0.1. Raises VimeError if the server does not come up."""
        import uvicorn
        from vllm.entrypoints.launchers.launcher import NoSignalServer

        app = await _application(llm, model)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = NoSignalServer(uvicorn.Config(app, log_level="warning", access_log=False))
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        deadline = asyncio.get_running_loop().time() + held(START_SECONDS)
        while not server.started:
            if task.done() or asyncio.get_running_loop().time() > deadline:
                task.cancel()
                sock.close()
                raise VimeError(f"the OpenAI-compatible server at {url} did not start within {START_SECONDS:.0f} s")
            await asyncio.sleep(0.02)
        return cls(url, server, task, sock)

    async def close(self) -> None:
        """Stop listening; open requests get a few seconds."""
        self._server.should_exit = True
        try:
            await asyncio.wait_for(self._task, CLOSE_SECONDS)
        except TimeoutError:
            self._server.force_exit = True
        self._socket.close()


async def _application(llm: AsyncLLM, model: str) -> Any:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The engine is already built; of these arguments only those of the server itself count.
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", model, "--generation-config", "vllm", "--disable-log-stats", "--host", "127.0.0.1"]
    )
    validate_parsed_serve_args(arguments)
    tasks = await llm.get_supported_tasks()
    app = build_app(arguments, tasks, llm.model_config)
    await init_app_state(llm, app.state, arguments, tasks)
    return app
