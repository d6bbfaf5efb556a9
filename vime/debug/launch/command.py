"""The COMMAND of ``vime debug-attach run -- COMMAND``: a Python program, and how the debug run's runner starts it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNNER = "vime.debug.stop.runner"
WHAT_WORKS = "give python3 train.py ARGS, python3 -m pkg.mod ARGS, train.py ARGS, or vime train RUN.toml"
_INTERPRETER = re.compile(r"python(?:3(?:\.\d+)?)?")
_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_BLIND = {
    "-I": "ignores PYTHONPATH, through which a debug run reaches its processes",
    "-E": "ignores PYTHONPATH, through which a debug run reaches its processes",
    "-S": "leaves out sitecustomize, through which a debug run reaches its processes",
    "-i": "wants to talk to a terminal",
    "-c": "names no file to stop in",
}
_HEAD_BYTES = 512
IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Command:
    """One Python program.

    words        as it was given
    interpreter  word that starts Python: as given; of a console script the path in its first line; "": none was given
    options      of the interpreter
    module       of ``-m``; "" for a file
    file         the program as it was given; of a console script its path here; "" for a module
    arguments    of the program
    is_script    a console script: another machine finds it by its name
    """

    words: tuple[str, ...]
    interpreter: str
    options: tuple[str, ...] = ()
    module: str = ""
    file: str = ""
    arguments: tuple[str, ...] = ()
    is_script: bool = False

    def here(self) -> tuple[str, ...]:
        """Words that start it on this machine, with the runner in front."""
        target = ("-m", self.module) if self.module else (self.file,)
        return (self.interpreter or sys.executable, *self.options, "-m", RUNNER, *target, *self.arguments)

    def entrypoint(self) -> str:
        """Shell command that starts it in a submitted job. A console script is the one that is found there: what
        reaches its processes is the environment.
        """
        if self.is_script:
            return shlex.join(self.words)
        target = ("-m", self.module) if self.module else (self.file,)
        return shlex.join([self.interpreter or "python3", *self.options, "-m", RUNNER, *target, *self.arguments])

    def ray_address(self) -> str:
        """What a command of vime is told to join; "" where it is not."""
        for index, word in enumerate(self.arguments):
            for option in ("--ray-address", "cluster.ray_address"):
                if word.startswith(f"{option}="):
                    return word.partition("=")[2].strip("\"'")
                if word == option and index + 1 < len(self.arguments):
                    return self.arguments[index + 1]
        return ""


def parse(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> Command:
    """ValueError where ``words`` start no Python program."""
    if not words or not words[0]:
        raise ValueError("no command: what shall be run?")
    first = words[0]
    if _INTERPRETER.fullmatch(os.path.basename(first)):
        return _interpreted(words)
    if first.endswith(".py"):
        return Command(tuple(words), "", file=first, arguments=tuple(words[1:]))
    return _script(words, environment)


def _interpreted(words: Sequence[str]) -> Command:
    options: list[str] = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        for letter in option[1:] if not option.startswith("--") and option[:2] not in _TAKE_A_VALUE else "":
            if f"-{letter}" in _BLIND:
                raise ValueError(f"{words[0]} {option}: -{letter} {_BLIND[f'-{letter}']}")
        if option == "-":
            raise ValueError(f"{words[0]} -: a program on standard input has no file to stop in")
        options.append(option)
        if option in _TAKE_A_VALUE and rest:
            options.append(rest.pop(0))
    if rest and rest[0] == "-m":
        if len(rest) < 2:
            raise ValueError(f"{words[0]} -m: which module?")
        return Command(tuple(words), words[0], tuple(options), module=rest[1], arguments=tuple(rest[2:]))
    if not rest or not rest[0]:
        raise ValueError(f"{shlex.join(words)}: no program for {words[0]}")
    return Command(tuple(words), words[0], tuple(options), file=rest[0], arguments=tuple(rest[1:]))


def _script(words: Sequence[str], environment: Mapping[str, str]) -> Command:
    name = words[0]
    beside = Path(sys.executable).with_name(name) if os.sep not in name else Path(name)
    found = shutil.which(name, path=environment.get("PATH")) or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None or os.path.isdir(found):
        raise ValueError(f"{name}: there is no such program, neither in PATH nor beside {sys.executable}")
    interpreter = _interpreter_of(Path(found))
    if not interpreter:
        raise ValueError(f"{name}: {found} is no program of a Python package")
    return Command(tuple(words), interpreter, file=os.path.abspath(found), arguments=tuple(words[1:]), is_script=True)


def _interpreter_of(script: Path) -> str:
    """The Python in the first line of ``script``, also in the form for long paths; "" where there is none."""
    with open(script, "rb") as file:
        head = file.read(_HEAD_BYTES)
    lines = head.decode(errors="replace").splitlines()
    if not lines or not lines[0].startswith("#!"):
        return ""
    words = lines[0][2:].split()
    if words[:1] == ["/bin/sh"] and len(lines) > 1 and lines[1].startswith("'''exec'"):
        words = shlex.split(lines[1].removeprefix("'''exec'"))
    elif words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words and _INTERPRETER.fullmatch(os.path.basename(words[0])) else ""


def problems_here(command: Command) -> list[str]:
    """Why it could not take part in a debug run on this machine."""
    found = []
    if command.file and not os.path.isfile(command.file):
        found.append(f"{command.file}: there is no such program")
    interpreter = shutil.which(command.interpreter or sys.executable)
    if interpreter is None:
        return [*found, f"{command.interpreter}: there is no such interpreter"]
    if Path(interpreter).parent == Path(sys.executable).parent:
        if importlib.util.find_spec("debugpy") is None:
            found.append("debugpy is not installed: pip install debugpy")
    elif why := _import_problem(interpreter):
        found.append(f"{command.interpreter} is {interpreter}: {why}; give {sys.executable} instead")
    return found


def _import_problem(interpreter: str) -> str:
    """Why another interpreter can take no part in a debug run; "" where it can."""
    words = [interpreter, "-c", "import vime.debug.stop.spec, debugpy"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=IMPORT_SECONDS, cwd=os.sep, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not start: {error}"
    return (done.stderr.strip().splitlines() or ["it ended"])[-1] if done.returncode else ""
