"""``vime debug-attach run``"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from vime_cli import output

PREFIX = "vime debug: "
CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
"""What follows the first word of COMMAND is the command's."""
EXAMPLES = """Examples:

\b
vime debug-attach run -b my_reward.py:6 -- vime train run.toml
vime debug-attach run -b vime.backends.megatron.step:train_step \\
    --rank 1 -- vime train run.toml parallel.dp=2
vime debug-attach run -b vllm.v1.engine.core:EngineCore.step --hit 10 \\
    -- vime rollout run.toml -n 1
vime debug-attach run -b train.py:12 --if 'self.rank == 1' \\
    -- python3 train.py
vime debug-attach run --post-mortem --submit http://127.0.0.1:8265 \\
    --working-dir . -- python3 train.py
"""

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND ARGS",
        help="python3 train.py ARGS, python3 -m pkg.mod ARGS, train.py ARGS, or vime train RUN.toml.",
        show_default=False,
    ),
]
Points = Annotated[
    list[str] | None,
    typer.Option(
        "-b", "--break", metavar="FILE:LINE|MODULE:QUALNAME", help="A point: stop there. Can be given several times."
    ),
]
Condition = Annotated[
    str, typer.Option("--if", metavar="EXPR", help="Only where this holds, at every point, in its frame's names.")
]
Rank = Annotated[
    str,
    typer.Option(
        "--rank",
        metavar="0,1|first|all",
        help="These ranks (vime's own, torch.distributed's, or RANK); the first process that gets there; or all. Ranks "
        "and --role also choose who stops at a breakpoint() in the program.",
    ),
]
Role = Annotated[
    str,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="driver, trainer, rollout, engine, engine-core, reward-worker; of other programs worker (Ray's), child.",
    ),
]
Hit = Annotated[int | None, typer.Option("--hit", metavar="N", help="At the N-th time.", show_default=False)]
Every = Annotated[bool, typer.Option("--every", help="Each time from then on, not once per process.")]
PostMortem = Annotated[bool, typer.Option("--post-mortem", help="Stop where an exception is raised that ends things.")]
MaxStops = Annotated[
    int | None,
    typer.Option("--max-stops", metavar="N", help="At so many exceptions of a process (1).", show_default=False),
]
Wait = Annotated[str, typer.Option("--wait", metavar="DURATION", help="Then a stop that nobody attaches to goes on.")]
Hold = Annotated[str, typer.Option("--hold", metavar="DURATION", help="How long the others wait for a stopped one.")]
Port = Annotated[str, typer.Option("--port", metavar="PORT|FROM-TO", help="Where to listen, on loopback (any free).")]
RayDebugger = Annotated[
    bool, typer.Option("--ray-debugger", help="Stop in Ray's own debugger, for its VS Code extension.")
]
Submit = Annotated[
    str, typer.Option("--submit", metavar="URL", help="As a job, such as http://127.0.0.1:8265 (also: RAY_ADDRESS).")
]
Local = Annotated[bool, typer.Option("--local", help="On this machine, whatever RAY_ADDRESS says.")]
Address = Annotated[
    str, typer.Option("--address", metavar="HOST:PORT", help="On this machine, joining the cluster with this GCS.")
]
RuntimeEnv = Annotated[
    str, typer.Option("--runtime-env-json", metavar="JSON", help="Runtime environment of the job, kept as it is.")
]
WorkingDir = Annotated[str, typer.Option("--working-dir", metavar="DIR", help="Folder that the job gets a copy of.")]


def run(
    command: Command = None,
    breakpoints: Points = None,
    condition: Condition = "",
    rank: Rank = "first",
    role: Role = "",
    hit: Hit = None,
    every: Every = False,
    post_mortem: PostMortem = False,
    max_stops: MaxStops = None,
    wait: Wait = "30m",
    hold: Hold = "4h",
    port: Port = "",
    ray_debugger: RayDebugger = False,
    submit: Submit = "",
    local: Local = False,
    address: Address = "",
    runtime_env_json: RuntimeEnv = "",
    working_dir: WorkingDir = "",
) -> None:
    """Run a program that stops where you say, in whichever process.

    Each stop is announced with the command that attaches to it. Your files are not changed, and no port is open before
    a stop. The exit code is that of COMMAND.
    """
    from vime.debug.launch.debug_run import Terminal
    from vime.debug.launch.debug_run import run as debug_run
    from vime.debug.launch.plan import Asked

    asked = Asked(
        command=tuple(command or ()),
        breakpoints=tuple(breakpoints or ()),
        condition=condition,
        rank=rank,
        role=role,
        hit=hit,
        is_every=every,
        is_post_mortem=post_mortem,
        max_stops=max_stops,
        wait=wait,
        hold=hold,
        port=port,
        is_ray_debugger=ray_debugger,
        submit=submit,
        is_local=local,
        address=address,
        runtime_env=runtime_env_json,
        working_dir=working_dir,
    )
    code = debug_run(asked, Terminal(_say, lambda text: output.warn([text]), output.text, _asker()))
    raise typer.Exit(code)


def _say(text: str) -> None:
    output.say(f"{PREFIX}{text}")


def _asker() -> Callable[[str], str] | None:
    """How to ask a person; None where nobody is at a terminal."""
    return _ask if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() else None


def _ask(question: str) -> str:
    """The answer; EOFError at the end of the input."""
    output.say(question)
    answer = sys.stdin.readline()
    if not answer:
        raise EOFError
    return answer
