"""``vime debug-attach run`` of a program of this machine: it stops, is attached to, goes on, ends, is ended."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
from debug_runs import VIME, DebugRun, attached, debug_run, live_runs, values

from vime.debug.attach.sessions import members_of
from vime.errors import VimeError

WORK = """\
import sys


def compute(i):
    total = 0
    for k in range(i):
        total += k
    return total


def main():
    for i in range(5):
        value = compute(i)
        print("value", i, value, flush=True)
    sys.exit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
"""
TREE = """\
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(child, start_new_session=True)
subprocess.run([*child[:2], "import os, time; os.fork() or (os.setsid(), time.sleep(600))"])  # a daemon
print("up", flush=True)
here = 1
subprocess.run(child)
"""
FAILS = """\
def share(total, parts):
    each = total / parts
    return each

share(12, 0)
"""


@pytest.fixture
def work(tmp_path):
    file = tmp_path / "work.py"
    file.write_text(WORK)
    return file


def test_it_stops_on_the_line_where_the_condition_holds_and_changes_nothing(tmp_path, work):
    before = (hashlib.sha1(work.read_bytes()).hexdigest(), work.stat().st_mtime_ns)
    with debug_run(tmp_path, "-b", "work.py:14", "--if", "i == 3", "--", "python3", "work.py", "7") as run:
        stop = run.stop()
        assert (stop.line, stop.function, stop.code, stop.who) == (
            14, "main", 'print("value", i, value, flush=True)', "driver"
        )  # fmt: skip
        run.until(lambda: f"connect {stop.key}, or a client of your own to 127.0.0.1:{stop.port}" in run.err)
        assert run.out == "value 0 0\nvalue 1 0\nvalue 2 1\n"
        with attached(stop) as (client, thread):
            top = client.stack(thread)[0]
            assert (top.file, top.line) == (str(work), 14)
            assert {"i": "3", "value": "3"}.items() <= values(client, thread).items()
            client.evaluate("value = 100", top)
            client.go("next", thread)
            client.stopped()
            assert client.stack(thread)[0].line == 12
            client.go("continue", thread)
            client.detach()
        assert run.end() == 7
    assert run.out.splitlines()[3:] == ["value 3 100", "value 4 6"]
    assert run.err.count("stopped at") == 1, "by run alone: both write to one terminal"
    assert "torch" not in run.err
    assert "who waits" not in run.err
    assert "raised to 4h (--hold): the time-outs of vLLM and NCCL\n" in run.err
    assert "p0 work.py:14: 1 stop\n" in run.err
    assert (hashlib.sha1(work.read_bytes()).hexdigest(), work.stat().st_mtime_ns) == before
    assert run.is_clean()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["-b", "work.py:14", "--if", "i == 33"],
            "p0 work.py:14 was reached by driver, but the condition 'i == 33' never",
        ),
        (
            ["-b", "work.py:14", "--hit", "9"],
            "p0 work.py:14 was reached by driver, but by none of them 9 times (--hit)",
        ),
        (["-b", "work.py:14", "--rank", "3"], "p0 work.py:14 was reached by driver alone, for whom --rank or --role"),
        (["-b", "json:dumps"], "p0 json:dumps was never reached"),
    ],
)
def test_a_point_that_never_stopped_says_why(tmp_path, work, options, said):
    with debug_run(tmp_path, *options, "--", "python3", "work.py", "0") as run:
        assert run.end() == 0
    assert f"warning: {said}" in run.err
    assert len(run.out.splitlines()) == 5
    assert run.is_clean()


def test_what_an_actor_of_vime_says_is_passed_on(tmp_path):
    """Its standard error is a file of Ray's."""
    (tmp_path / "actor.py").write_text(
        "import os, time\nfrom vime.reward.role import introduce\n"
        "introduce('trainer', 1)\nos.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        "for i in range(3):\n    i += 1\ntime.sleep(3)\n"
    )
    with debug_run(tmp_path, "-b", "actor.py:6", "--if", "j == 2", "--", "python3", "actor.py") as run:
        assert run.end() == 0
    said = "trainer 1: condition 'j == 2' of actor.py:6 fails: NameError: name 'j' is not defined; it goes on\n"
    assert run.err.count(f"vime debug: {said}") == 1
    assert run.is_clean()


def test_nobody_attaches_and_it_goes_on(tmp_path, work):
    with debug_run(tmp_path, "-b", "work.py:14", "--every", "--wait", "0.2s", "--", "work.py", "0") as run:
        assert run.end() == 0
    assert len(run.out.splitlines()) == 5
    assert "p0 work.py:14: 5 stops" in run.err


def test_it_stops_where_an_error_was_raised_and_keeps_the_exit_code(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    with debug_run(tmp_path, "--post-mortem", "--", "python3", "fails.py") as run:
        stop = run.stop()
        assert (stop.line, stop.function, stop.reason) == (2, "share", "ZeroDivisionError: division by zero")
        assert "ZeroDivisionError: division by zero" in run.err
        with attached(stop) as (client, thread):
            assert values(client, thread).items() >= {"total": "12", "parts": "0"}.items()
            client.detach()
        assert run.end() == 1
    assert "post-mortem: 1 stop" in run.err


@pytest.mark.parametrize("command", [["python3", "-m", "pkg.start", "4"], ["-m"]])
def test_modules_and_console_scripts(tmp_path, work, command):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "start.py").write_text(WORK)
    point, words, code = ("pkg.start:compute", command, 4)
    if command == ["-m"]:
        point, words, code = ("vime_cli.output:versions", ["vime", "--version"], 0)
    with debug_run(tmp_path, "-b", point, "--wait", "1s", "--", *words) as run:
        assert run.end() == code
    assert f"p0 {point}: 1 stop" in run.err
    assert "value 4 6" in run.out or "vime 0" in run.out


def test_500_variables_with_newlines_and_braces_are_all_there(tmp_path):
    """Case D13."""
    (tmp_path / "ask.py").write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    many = {f"MANY_{i}": f"value {i}" for i in range(500)} | {"ODD": '{"a":\n"${PATH}"}\n\'"'}
    with debug_run(tmp_path, "-b", "ask.py:2", "--wait", "1s", "--", "python3", "ask.py", **many) as run:
        assert run.end() == 0
    assert json.loads(run.out).items() >= many.items()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_it_leaves_no_process_and_no_entry(tmp_path, number, code):
    """SIGKILL too: the guard is there for it. Sources stay as they are."""
    (tmp_path / "tree.py").write_text(TREE)
    with debug_run(tmp_path, "-b", "tree.py:6", "--", "python3", "tree.py") as run:
        stop = run.stop()
        run.until(lambda: "who waits for driver is not known" in run.err)
        assert len(members_of(run.session_said)) >= 3
        assert live_runs(run.registry) == [run.session_said]
        run.process.send_signal(number)
        assert run.end() == code
    assert run.is_clean()
    assert run.err.count("KeyboardInterrupt") == 1
    assert "vime/debug/stop" not in run.err, "the traceback ends at its own line"
    assert not os.path.exists(f"/proc/{stop.pid}")
    assert (tmp_path / "tree.py").read_text() == TREE


def test_a_command_that_is_deaf_to_ctrl_c_is_ended_by_the_next_signal(tmp_path):
    """As a shell starts what it puts into the background."""
    (tmp_path / "deaf.py").write_text(f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{TREE}")
    with debug_run(tmp_path, "-b", "deaf.py:8", "--", "python3", "deaf.py") as run:
        run.stop()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert "ended by SIGTERM" in run.err
    assert run.is_clean()


@pytest.mark.parametrize("what", ["folder", "cluster"])
def test_where_stops_cannot_be_noted_nothing_is_started(tmp_path, work, what):
    options = ["--address", "127.0.0.1:1"] if what == "cluster" else []
    (tmp_path / f"vime-debug-{os.getuid()}").mkdir(mode=0o755)
    with debug_run(tmp_path, "-b", "work.py:14", *options, "--", "work.py", "0", registry=object()) as run:
        assert run.end() == (3 if what == "cluster" else 2)
    assert run.out == ""
    said = "127.0.0.1:1 does not answer" if what == "cluster" else "is not a folder that is yours alone"
    assert next(line for line in run.err.splitlines() if said in line).startswith("error: ")


def test_a_cluster_that_refuses_leaves_nothing_running(tmp_path, work, monkeypatch):
    """It answers and does not let us in: known once the program runs."""
    from vime.debug.launch import local as launch
    from vime.debug.launch.plan import Asked, plan

    def refuse(address):
        raise VimeError("token needed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.gcs, "client", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        planned = plan(Asked(command=(sys.executable, "work.py", "0"), address=address))
        with pytest.raises(VimeError, match="token needed"):
            launch.LocalCommand.start(planned)
    assert members_of(planned.spec.session) == []


@pytest.mark.parametrize(("answer", "code", "said"), [("r", 5, "1 resumed"), ("e", 130, "the debug run ends")])
def test_ctrl_c_at_a_terminal_asks(tmp_path, work, answer, code, said):
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*VIME, "debug-attach", "run", "-b", "work.py:14", "--", "work.py", "5"]
    process = subprocess.Popen(
        command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment, cwd=tmp_path
    )
    os.close(other_end)
    screen = Screen(terminal)
    try:
        screen.read_until("has stopped")
        process.send_signal(signal.SIGINT)
        screen.read_until("(e)?")
        os.write(terminal, f"{answer}\n".encode())
        screen.read_until(said)
        screen.read_until("p0 work.py:14: 1 stop")
        assert process.wait(60) == code
    finally:
        process.kill()
        os.close(terminal)
    assert ("value 4 6" in screen.text) == (answer == "r")


class Screen:
    """What a terminal shows."""

    def __init__(self, descriptor):
        self.descriptor, self.text = descriptor, ""

    def read_until(self, text):
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert select.select([self.descriptor], [], [], max(0, deadline - time.monotonic()))[0], self.text
            try:
                self.text += os.read(self.descriptor, 4096).decode(errors="replace")
            except OSError:  # everybody has left
                raise AssertionError(f"no {text!r}: {self.text}") from None


def test_stop_ends_it_from_another_terminal_and_does_not_guess(tmp_path):
    (tmp_path / "tree.py").write_text(TREE)
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = []
    for folder in folders:
        folder.mkdir()
    try:
        for folder in folders:
            arguments = ["-b", tmp_path / "tree.py:6", "--", "python3", "../tree.py"]
            runs.append(DebugRun(folder, arguments, FolderOf(tmp_path).registry, TMPDIR=str(tmp_path)))
        names = [run.until(lambda r=run: "has stopped" in r.err) and run.session_said for run in runs]
        refused = stop_command(tmp_path)
        assert refused.returncode == 2
        assert all(name in refused.stderr for name in names)
        assert stop_command(tmp_path, names[0]).returncode == 0
        assert runs[0].end() == 143
        assert runs[1].process.poll() is None
        runs[1].process.kill()  # its guard ends the rest
        runs[1].end()
        assert runs[0].is_clean()
        assert runs[1].is_clean()
        assert stop_command(tmp_path, "--all").returncode == 2  # there is none
    finally:
        for run in runs:
            run.close()


class FolderOf:
    def __init__(self, folder):
        from vime.debug.stop.registry import FolderRegistry

        self.registry = FolderRegistry(folder / f"vime-debug-{os.getuid()}")


def stop_command(folder, *arguments):
    environment = {**os.environ, "TMPDIR": str(folder), "RAY_ADDRESS": "local"}
    command = [*VIME, "debug-attach", "stop", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
