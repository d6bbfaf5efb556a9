"""Stops of scripts without Ray: on the line, once, with the locals; then the program goes on as if nothing had been."""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from vime.debug.stop.records import ATTACHED, RUNNING, release, stops
from vime.debug.stop.say import say
from vime.debug.stop.spec import Who

SCRIPT = """
    '''A program.'''
    from __future__ import annotations
    import sys, time

    def work(i):
        total = i * 2
        total += 1
        return total

    def main():
        out = 0
        for i in range(5):
            out += work(i)
        return out

    if __name__ == "__main__":
        print("RESULT", main(), flush=True)
        for _ in range(200):
            time.sleep(0.01)
            if sys.gettrace() is None:
                break
        def traced():
            return sys.gettrace()
        print("TRACE", traced(), flush=True)
"""


def test_stops_on_the_line_and_a_changed_variable_changes_the_result(debug_run: Any, attached: Any) -> None:
    script = debug_run.write("train.py", SCRIPT)
    before = script.read_bytes(), script.stat().st_mtime_ns
    debug_run.point("train.py", "total += 1", condition="i == 2")
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.line, stop.function, stop.code, stop.role) == (7, "work", "total += 1", "driver")
    assert stop.reason == "breakpoint i == 2"
    assert stop.file == str(script)
    client = attached(stop)
    assert client.at == ("work", "train.py", 7)
    assert [frame.name for frame in client.stack] == ["work", "main", "<module>"]  # none of ours
    assert client.locals() == {"i": "2", "total": "4"}
    assert stops(debug_run.registry)[0].state == ATTACHED
    client.dap.evaluate("total = 100", client.stack[0])
    after = client.next()
    assert after.at == ("work", "train.py", 8)
    assert after.locals()["total"] == "101"
    after.leave()
    code, said = started.end()
    assert code == 0
    assert "RESULT 121" in said
    assert "TRACE None" in said
    assert f"driver stopped at {script}:7 in work (breakpoint i == 2), pid {stop.pid} on" in said
    assert f"attach: vime debug-attach connect {stop.key}; goes on by itself in 2 min" in said
    assert stops(debug_run.registry) == []
    assert before == (script.read_bytes(), script.stat().st_mtime_ns)


def test_a_client_that_vanishes_lets_the_process_go_untraced(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", SCRIPT)
    debug_run.point("train.py", "total += 1")
    started = debug_run.start("train.py")
    client = attached(started.stops()[0])
    client.dap.close()
    code, said = started.end()
    assert code == 0
    assert "RESULT 25" in said
    assert "TRACE None" in said
    assert stops(debug_run.registry) == []


def test_a_function_of_a_module_and_of_main(debug_run: Any, attached: Any) -> None:
    debug_run.write("pkg/__init__.py", "")
    debug_run.write(
        "pkg/work.py",
        """
        class Worker:
            class Inner:
                def step(self, x):
                    "Doc."
                    return x + 1
        """,
    )
    debug_run.write(
        "train.py",
        """
        from pkg.work import Worker
        async def main():
            'doc'
            y = Worker.Inner().step(1)
            return y
        import asyncio
        print("RESULT", asyncio.run(main()))
        """,
    )
    debug_run.point("pkg.work:Worker.Inner.step")
    debug_run.point("__main__:main")
    started = debug_run.start("train.py")
    client = attached(started.stops()[0])
    assert client.at == ("main", "train.py", 4)
    client.dap.go("continue", client.thread)
    thread, _ = client.dap.stopped()
    top = client.dap.stack(thread)[0]
    assert (top.name, top.line) == ("step", 5)
    stop = next(s for s in stops(debug_run.registry) if s.state == ATTACHED)
    assert (stop.function, stop.line) == ("Worker.Inner.step", 5)
    client.leave()
    assert started.end() == (0, started.log.read_text())
    assert "RESULT 2" in started.log.read_text()


def test_nobody_attaches_and_it_goes_on_untraced(debug_run: Any) -> None:
    debug_run.write("train.py", SCRIPT)
    debug_run.point("train.py", "total += 1")
    debug_run.set(wait_seconds=1.0)
    code, said = debug_run.start("train.py").end()
    assert code == 0
    assert said.count("nobody attached within 1 s: driver goes on") == 1
    assert "RESULT 25" in said
    assert "TRACE None" in said
    assert stops(debug_run.registry) == []


def test_a_stop_is_released_and_the_next_one_has_a_client(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", SCRIPT)
    debug_run.point("train.py", "total += 1", is_every=True, hit=3)
    started = debug_run.start("train.py")
    first = started.stops()[0]
    release(debug_run.registry, [first])
    started.until(lambda: any(s.key != first.key for s in stops(debug_run.registry)), "a second stop")
    second = started.stops()[0]
    client = attached(second)
    assert client.locals()["i"] == "3"
    client.dap.go("continue", client.thread)
    thread, _ = client.dap.stopped()
    assert {v.name: v.value for v in client.dap.locals(client.dap.stack(thread)[0])}["i"] == "4"
    client.dap.go("continue", thread)
    client.dap.detach()
    code, said = started.end()
    assert (code, "was told to go on" in said, "TRACE None" in said) == (0, True, True)


def test_who_lets_go_and_stays_is_noted_as_such(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import os, time
        a = 1
        while not os.path.exists("go"):
            time.sleep(0.05)
        """,
    )
    debug_run.point("train.py:2")
    started = debug_run.start("train.py")
    client = attached(started.stops()[0])
    client.dap.go("continue", client.thread)
    started.stops(state=RUNNING)
    (debug_run.folder / "go").touch()
    assert started.end()[0] == 0  # with its client
    assert stops(debug_run.registry) == []


def test_breakpoint_stops_and_needs_no_ray(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", "x = 1\nbreakpoint()\nx += 1\nprint('RESULT', x)\n")
    debug_run.environment["PYTHONBREAKPOINT"] = "ray.util.rpdb.set_trace"  # case D01: what a job's driver inherits
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.point, stop.line, stop.code) == ("breakpoint()", 2, "breakpoint()")
    client = attached(stop)
    assert client.stack[0].line == 3
    client.leave()
    code, said = started.end()
    assert (code, "RESULT 2" in said) == (0, True)


TWICE = """
    import time
    for i in range(3):
        breakpoint()
        x = i
        time.sleep(1)  # until the client has gone: what it is there for is shown to it
    print("RESULT", x)
"""


def test_every_breakpoint_stops_with_a_client_or_without(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", TWICE)
    started = debug_run.start("train.py")
    first = started.stops()[0]
    attached(first).dap.detach()
    started.until(lambda: any(s.key != first.key for s in stops(debug_run.registry)), "a second stop")
    second = started.stops()[0]
    release(debug_run.registry, [second])
    started.until(lambda: any(s.key not in (first.key, second.key) for s in stops(debug_run.registry)), "a third")
    client = attached(started.stops()[0])
    assert client.locals()["i"] == "2"
    client.leave()
    code, said = started.end()
    assert (code, "RESULT 2" in said, said.count(" stopped at ")) == (0, True, 3)


def test_kill_at_a_stop_leaves_no_trace_in_the_sources(debug_run: Any) -> None:
    main = debug_run.write("train.py", "import work\nprint(work.f(1))\n")
    module = debug_run.write("work.py", "def f(x):\n    y = x\n    return y\n")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (main, module)}
    debug_run.point("work.py:2")
    debug_run.environment["PYTHONDONTWRITEBYTECODE"] = ""
    started = debug_run.start("train.py")
    started.stops()
    started.process.send_signal(signal.SIGKILL)
    started.process.wait(30)
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (main, module)}
    assert not [p for p in debug_run.folder.rglob("*.pyc") if "work" in p.name]
    clean = subprocess.run([sys.executable, "train.py"], cwd=debug_run.folder, capture_output=True, text=True)
    assert (clean.stdout, clean.stderr) == ("1\n", "")


def test_ports_that_are_taken(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", "x = 1\ny = 2\nprint('RESULT', x + y)\n")
    debug_run.point("train.py:2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        debug_run.set(ports=(port, port))
        code, said = debug_run.start("train.py").end()
        assert code == 0
        assert f"no debug port: all of {port}-{port} on 127.0.0.1 are taken" in said
        assert "RESULT 3" in said
        debug_run.set(ports=(port, port + 20), session="d-2")
        started = debug_run.start("train.py")
        stop = started.stops()[0]
        assert port < stop.port <= port + 20
        attached(stop).leave()
        assert started.end()[0] == 0


def test_a_condition_that_fails_is_told_once_and_ends_nothing(debug_run: Any) -> None:
    debug_run.write("train.py", "for i in range(5):\n    x = i\nprint('RESULT', x)\n")
    debug_run.point("train.py:2", condition="nothing > 1")
    code, said = debug_run.start("train.py").end()
    assert code == 0
    assert said.count("condition 'nothing > 1' of train.py:2 fails: NameError") == 1
    assert "RESULT 4" in said


def test_a_file_that_cannot_have_points_is_loaded_as_ever(debug_run: Any) -> None:
    debug_run.write("work.py", f"def f(x):\n    return {' + '.join(['x'] * 1500)}\n")
    debug_run.write("train.py", "import work\nprint('RESULT', work.f(1))\n")
    debug_run.point("work.py:2")
    code, said = debug_run.start("train.py").end()
    assert (code, "RESULT 1500" in said, f"{debug_run.folder}/work.py has no points in process" in said) == (
        0,
        True,
        True,
    )


def test_what_is_said_is_seen_past_a_stream_that_fails(capfd: Any, monkeypatch: Any) -> None:
    class Busy:
        def write(self, _text: str) -> None:
            raise RuntimeError("reentrant call")  # as Python's own, where a signal comes while it writes

    monkeypatch.setattr(sys, "stderr", Busy())
    say("caf\xe9 \udc80")
    assert capfd.readouterr().err == "vime debug: caf\xe9 \\udc80\n"


def test_a_condition_with_a_scope_of_its_own_sees_the_locals(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", "def f(limit, xs):\n    return 1\ndef same(x):\n    return x\nf(9, [1])\nf(1, [2])\n")
    debug_run.point("train.py:2", condition="same(all(x > limit for x in xs))")
    debug_run.point("train.py:4")  # never there: what a condition calls does not stop
    started = debug_run.start("train.py")
    client = attached(started.stops()[0])
    assert client.locals()["limit"] == "1"
    client.leave()
    assert started.end()[0] == 0
    assert started.log.read_text().count(" stopped at ") == 1


def test_other_roles_and_ranks_do_not_stop(debug_run: Any) -> None:
    debug_run.write("train.py", "for i in range(3):\n    x = i\n    breakpoint()\n")
    debug_run.set(breakpoints=Who(ranks=(1,)))
    debug_run.point("train.py:2", who=Who(ranks=(1,)))
    debug_run.point("train.py:2", who=Who(roles=("trainer",)))
    code, said = debug_run.start("train.py").end()
    assert code == 0
    assert said.count("train.py:2 was reached by driver (pid") == 1
    assert "has no rank: it is for rank 1" in said
    assert said.count("breakpoint() at ") == said.count("/train.py:3 does not stop in driver (pid ") == 1
    assert "stopped" not in said


def test_a_rank_that_is_known_later_counts_from_then_on(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        from vime.debug.stop.identity import introduce
        for i in range(6):
            if i == 3:
                introduce("trainer", 0)
            if i == 4:
                introduce("trainer", 1)
            x = i
        """,
    )
    debug_run.point("train.py", "x = i", who=Who(ranks=(1,)))
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.who, stop.key.split("-")[0]) == ("trainer 1", "trainer1")
    client = attached(stop)
    assert client.stack[0].line == 7
    client.leave()
    assert started.end()[0] == 0


def test_a_signal_pauses_where_the_process_is(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import os, time
        def wait():
            n = 0
            while not os.path.exists("go"):
                n += 1
                time.sleep(0.02)
        print("READY", flush=True)
        wait()
        """,
    )
    started = debug_run.start("train.py")
    started.said("READY")
    time.sleep(0.2)  # into the loop
    started.process.send_signal(signal.SIGUSR2)
    stop = started.stops()[0]
    assert (stop.point, stop.function) == ("pause", "wait")
    client = attached(stop)
    assert client.stack[0].name == "wait"
    started.process.send_signal(signal.SIGUSR2)  # stopped already: no second stop
    client.dap.evaluate("n", client.stack[0])  # by the main thread, which has met the signal then
    assert [found.key for found in stops(debug_run.registry)] == [stop.key]
    (debug_run.folder / "go").touch()
    client.leave()
    assert started.end()[0] == 0
    assert started.log.read_text().count(" stopped at ") == 1


def test_a_signal_that_is_taken_is_told(debug_run: Any) -> None:
    ignoring = "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN)"
    script = f"{ignoring}; import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    debug_run.write("train.py", "print('RESULT')\n")
    command = [sys.executable, "-c", script, sys.executable, "-m", "vime.debug.stop.runner", "train.py"]
    done = subprocess.run(command, cwd=debug_run.folder, env=debug_run.environ(), capture_output=True, text=True)
    assert done.returncode == 0
    assert "cannot be paused: its signal SIGUSR2 is taken" in done.stderr


def test_a_registry_that_is_gone_does_not_end_the_program(debug_run: Any) -> None:
    debug_run.write("train.py", SCRIPT)
    debug_run.point("train.py", "total += 1", who=Who(is_first=True))
    debug_run.set(folder="/proc/none/registry")
    code, said = debug_run.start("train.py").end()
    assert code == 0
    assert "goes on without a stop" in said
    assert "RESULT 25" in said


def test_no_debugger_is_loaded_before_a_point_is_hit(debug_run: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import sys
        def f():
            return 1
        print("LOADED", [m for m in ("debugpy", "pydevd", "ray", "vime.debug.stop.pause") if m in sys.modules])
        """,
    )
    debug_run.point("train.py:3")
    assert "LOADED []" in debug_run.start("train.py").end()[1]


def test_what_was_imported_before_is_told(debug_run: Any) -> None:
    work = debug_run.write("work.py", "def f():\n    return 1\n")
    debug_run.write(
        "train.py", "import work\nfrom vime.debug.stop import boot\nboot.install()\nprint('RESULT', work.f())\n"
    )
    debug_run.point("work.py:2")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=debug_run.folder,
        env={**os.environ, "VIME_DEBUG_SPEC": debug_run.spec.dumps()},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "RESULT 1\n"
    assert "work.py:2 never stops in process" in done.stderr
    assert work.exists()
