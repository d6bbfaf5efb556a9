"""Stops in what a debug run starts: spawned, forked and plain children, and threads; and at errors nobody catches."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vime.debug.stop
from vime.debug.stop.records import release, stops
from vime.debug.stop.spec import Who

SITE = Path(vime.debug.stop.__file__).with_name("site")


def test_spawned_children_stop_in_the_main_file_and_in_a_module(debug_run: Any, attached: Any) -> None:
    debug_run.write("work.py", "def g(x):\n    return x * 2\n")
    debug_run.write(
        "train.py",
        """
        import multiprocessing
        import work

        def f(x):
            y = work.g(x)
            return y + 1

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("RESULT", pool.map(f, [1, 2]))
        """,
    )
    debug_run.point("train.py", "y = work.g(x)")
    debug_run.point("work:g")
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.role, stop.line, stop.pid == started.process.pid) == ("child", 5, False)
    client = attached(stop)
    assert client.at == ("f", "train.py", 5)
    client.dap.go("continue", client.thread)
    thread, _ = client.dap.stopped()
    assert client.dap.stack(thread)[0].name == "g"
    client.leave()
    code, said = started.end()
    assert (code, "RESULT [3, 5]" in said) == (0, True)


def test_a_child_program_stops(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py", "import subprocess, sys\nsubprocess.run([sys.executable, '-OO', 'child.py', 'a b'], check=True)\n"
    )
    debug_run.write("child.py", "import sys\nname = sys.argv[1]\nprint('CHILD', name, __name__, sys.flags.optimize)\n")
    debug_run.point("child.py:3")
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert stop.role == "child"
    client = attached(stop)
    assert client.stack[0].line == 3
    assert client.locals()["name"] == "'a b'"
    client.leave()
    code, said = started.end()
    assert (code, "CHILD a b __main__ 2" in said) == (0, True)


def test_a_forked_child_has_a_port_of_its_own(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import os, sys
        def f(x):
            y = x
            return y
        f(1)
        pid = os.fork()
        if pid == 0:
            f(2)
            print("CHILD", sys.gettrace(), flush=True)
            os._exit(7)
        print("RESULT", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
    )
    debug_run.point("train.py", "y = x")
    started = debug_run.start("train.py")
    first = started.stops()[0]
    client = attached(first)
    client.dap.go("continue", client.thread)
    child = next(s for s in started.stops() if s.pid != first.pid)
    assert (child.role, child.port != first.port) == ("child", True)
    assert first.key in [stop.key for stop in stops(debug_run.registry)]  # it is not the child's to take back
    other = attached(child)
    assert other.locals()["x"] == "2"
    other.leave()
    client.dap.detach()
    code, said = started.end()
    assert (code, "RESULT 7" in said) == (0, True)


def test_a_forked_child_of_a_process_that_never_stopped(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import multiprocessing
        def f(x):
            y = x
            return y
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print("RESULT", pool.map(f, [3]))
        """,
    )
    debug_run.point("train.py", "y = x")
    started = debug_run.start("train.py")
    client = attached(started.stops()[0])
    assert client.locals()["x"] == "3"
    client.leave()
    assert (started.end()[0], "RESULT [3]" in started.log.read_text()) == (0, True)


THREADS = """
    import threading
    seen = []
    together = threading.Barrier(3)
    def f(i):
        together.wait()
        j = i
        seen.append(j)
    threads = [threading.Thread(target=f, args=(i,), name=f"T{i}") for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print("RESULT", sorted(seen))
"""


def test_threads_that_stop_at_once(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", THREADS)
    debug_run.point("train.py", "j = i", is_every=True)
    started = debug_run.start("train.py")
    found = started.stops(3)
    assert {s.thread for s in found} == {"T0", "T1", "T2"}
    assert len({s.port for s in found}) == 1
    assert len({s.key for s in found}) == 3
    release(debug_run.registry, [s for s in found if s.thread == "T1"])
    started.until(lambda: len(stops(debug_run.registry)) == 2, "two stops left")
    client = attached(found[0])
    threads = {t["name"]: t["id"] for t in client.dap.ask("threads")["threads"]}
    # debugpy tells of one stop for all threads that stop at once, and lets all go on together
    assert all(client.dap.stack(threads[s.thread])[0].line == 6 for s in found if s.thread != "T1")
    client.dap.go("continue", client.thread)
    started.said("RESULT [0, 1, 2]")
    client.dap.detach()
    code, said = started.end()
    assert (code, "RESULT [0, 1, 2]" in said) == (0, True)
    assert stops(debug_run.registry) == []


def test_once_is_once_of_all_threads(debug_run: Any, attached: Any) -> None:
    debug_run.write("train.py", THREADS)
    debug_run.point("train.py", "j = i", who=Who(is_first=True))
    started = debug_run.start("train.py")
    attached(started.stops()[0]).leave()
    assert started.end()[0] == 0
    assert started.log.read_text().count(" stopped at ") == 1


def test_the_first_of_all_processes_of_the_run(debug_run: Any) -> None:
    at_the_end = "class D:\n    def __del__(self):\n        self.x = 1\nd = D()\n"  # where no debugger runs any more
    debug_run.write("train.py", f"x = 1\ny = 2\n{at_the_end}")
    debug_run.point("train.py:2", who=Who(is_first=True))
    debug_run.point("train.py:2")
    debug_run.point("train.py", "self.x = 1")
    debug_run.set(wait_seconds=0.2)
    said = [debug_run.start("train.py").end()[1] for _ in range(2)]
    assert [text.count(" stopped at ") for text in said] == [2, 1]


def test_an_error_of_the_main_program_stops_in_its_frame(debug_run: Any, attached: Any) -> None:
    debug_run.write("work.py", "import json\ndef load(text):\n    n = len(text)\n    return json.loads(text), n\n")
    debug_run.write("train.py", "from work import load\ndef main():\n    load('{')\nmain()\n")
    debug_run.set(post_mortem=Who())
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.point, stop.line, stop.function) == ("post-mortem", 4, "load")
    assert stop.reason.startswith("JSONDecodeError: Expecting property name")
    client = attached(stop, exceptions=())
    assert client.at == ("load", "work.py", 4)
    assert client.locals() == {"n": "1", "text": "'{'"}
    client.leave()
    code, said = started.end()
    assert code == 1
    assert said.index("Traceback") < said.index("json.decoder.JSONDecodeError") < said.index(" stopped at ")
    assert said.count("Traceback") == 1
    assert "runner.py" not in said
    assert "runpy" not in said


def test_a_hook_of_the_programs_own_is_kept(debug_run: Any) -> None:
    debug_run.write("train.py", "import sys\nsys.excepthook = lambda *a: print('MINE', a[1])\nraise ValueError('x')\n")
    debug_run.set(post_mortem=Who(), wait_seconds=0.3)
    code, said = debug_run.start("train.py").end()
    assert (code, said.startswith("MINE x\nvime debug: driver stopped at ")) == (1, True)


def test_an_error_of_a_thread_stops(debug_run: Any, attached: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import threading
        def f(x):
            return 1 / x
        t = threading.Thread(target=f, args=(0,), name="T")
        t.start(); t.join()
        print("RESULT")
        """,
    )
    debug_run.set(post_mortem=Who())
    started = debug_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.line, stop.thread, stop.reason) == (3, "T", "ZeroDivisionError: division by zero")
    client = attached(stop)
    assert client.locals() == {"x": "0"}
    client.leave()
    code, said = started.end()
    assert (code, "RESULT" in said, said.count("ZeroDivisionError: division by zero\n")) == (0, True, 1)


def test_post_mortem_has_a_limit_and_leaves_exits_alone(debug_run: Any) -> None:
    debug_run.write(
        "train.py",
        """
        import dataclasses, sys
        from vime.debug.stop.post_mortem import stop_at
        @dataclasses.dataclass(frozen=True)
        class Frozen(Exception):
            text: str
        class Mute(Exception):
            def __str__(self):
                raise ValueError
        def deep():
            deep()
        def fail(error):
            raise error
        for error in (Frozen("one"), Mute(), None, ValueError("four")):
            try:
                fail(error) if error else deep()
            except Exception as error:
                stop_at(error)
                stop_at(error)
        sys.exit(5)
        """,
    )
    debug_run.set(post_mortem=Who(), max_stops=3, wait_seconds=0.1)
    code, said = debug_run.start("train.py").end()
    assert code == 5
    reasons = ("fail (Frozen: one)", "fail (Mute: <str() failed>)", "deep (RecursionError: ", "ValueError: four")
    assert [said.count(reason) for reason in reasons] == [1, 1, 1, 0]


def test_post_mortem_of_the_first_only_and_of_a_role(debug_run: Any) -> None:
    debug_run.write("train.py", "raise ValueError('x')\n")
    debug_run.set(post_mortem=Who(roles=("trainer",)), wait_seconds=0.3)
    code, said = debug_run.start("train.py").end()
    assert (code, "stopped at" in said) == (1, False)
    debug_run.set(post_mortem=Who(is_first=True))
    codes = [debug_run.start("train.py").end() for _ in range(2)]
    assert [(code, "stopped at" in said) for code, said in codes] == [(1, True), (1, False)]


SAME = """
    import atexit, inspect, os, pickle, sys, threading, time, warnings, weakref
    class A:
        pass
    def kept(a):
        mine = locals()
        b = A()
        gone = weakref.ref(b)
        c = 1
        del b
        return sorted(mine), gone() is None
    names = sorted(n for n in globals() if n != "__vime_hit__")
    print(sys.argv, __name__, __file__, __spec__ and __spec__.name, sys.path[0], __package__, __doc__, names)
    print(type(pickle.loads(pickle.dumps(A()))), __annotations__, type(__loader__).__name__, kept(1))
    print(inspect.getsource(kept), sys.gettrace(), threading.active_count())
    warnings.warn("where")
    atexit.register(lambda: print("at exit", getattr(sys, "last_value", None)))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    if sys.argv[1] == "hook":
        sys.excepthook = lambda kind, error, traceback: print("hook", error, traceback.tb_lineno) or 1 / 0
    if sys.argv[1] != "3":
        kept(1)[0].nothing
    sys.exit(int(sys.argv[1]))
"""


def test_the_runner_is_python_as_ever(debug_run: Any) -> None:
    """Points that never stop change nothing: neither what is printed, tracebacks included, nor the exit code."""
    debug_run.write("pkg/__init__.py", "")
    for name in ("train.py", "pkg/mod.py", "pkg/__main__.py"):
        debug_run.write(name, SAME)
        debug_run.point(name, "del b", condition="a == 2")
        debug_run.point(name, "class A", condition="False")
    debug_run.write("interrupted.py", "def f():\n    raise KeyboardInterrupt\nf()\n")
    debug_run.write("broken.py", "x = (1 +\n")
    debug_run.write("imports.py", "import pkg.mod2, broken\n")
    debug_run.write("pkg/mod2.py", "def f():\n    return 1\nf()\n")
    debug_run.point("pkg/mod2.py:2", condition="1 > 2")
    debug_run.set(post_mortem=Who(roles=("trainer",)))
    lines = "train.py 3;./train.py x;train.py hook;pkg x;-m pkg.mod 3;-m pkg.mod x;interrupted.py;imports.py;nothing.py"
    for words in map(str.split, f"{lines};-m pkg.nothing".split(";")):
        plain, debug = (
            subprocess.run([sys.executable, *way], cwd=debug_run.folder, env=env, capture_output=True, text=True)
            for way, env in ((words, None), (["-m", "vime.debug.stop.runner", *words], debug_run.environ()))
        )
        where = words, debug.stderr
        assert (plain.returncode, plain.stdout) == (debug.returncode, debug.stdout), where
        assert _but_our_hook(debug.stderr) == plain.stderr, where


def _but_our_hook(traceback: str) -> str:
    """Of an error in the program's own ``sys.excepthook``: without the frame that calls it."""
    lines = traceback.splitlines(keepends=True)
    ours = [i for i, line in enumerate(lines) if "in at_error" in line]
    return "".join(line for i, line in enumerate(lines) if i not in ours and i - 1 not in ours)


def test_another_sitecustomize_is_run_as_well(debug_run: Any) -> None:
    other = debug_run.folder.parent / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = __name__\n")
    debug_run.environment["PYTHONPATH"] = str(other)
    debug_run.write("train.py", "import sys\nprint('RESULT', mine, sys.modules['sitecustomize'].__file__)\n")
    said = debug_run.start("train.py").end()[1]
    assert f"RESULT sitecustomize {other}/sitecustomize.py" in said


def test_a_process_that_cannot_take_it_up_goes_on(debug_run: Any) -> None:
    hidden = """
import runpy, sys
class Hidden:
    def find_spec(name, path=None, target=None):
        if name == "vime":
            raise ModuleNotFoundError("No module named 'vime'", name="vime")
sys.meta_path.insert(0, Hidden)
runpy.run_path(sys.argv[1])
"""
    site = str(SITE / "sitecustomize.py")
    broken = {**os.environ, "VIME_DEBUG_SPEC": "{nonsense", "PYTHONPATH": str(SITE)}
    silent = subprocess.run(
        [sys.executable, "-c", hidden, site],
        env=debug_run.environ() | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert (silent.returncode, silent.stderr) == (0, "")
    told = subprocess.run(
        [sys.executable, "-c", "print('RESULT')"],
        env=broken,
        capture_output=True,
        text=True,
    )
    assert (told.returncode, told.stdout) == (0, "RESULT\n")
    assert "VIME_DEBUG_SPEC is not readable" in told.stderr
    hook = "import os; from vime.debug.stop.worker import set_up; os.taken = lambda: print('RESULT'); set_up()"
    environment = {**os.environ, "VIME_DEBUG_SPEC": "{nonsense", "VIME_DEBUG_SETUP_HOOK": "os.taken"}
    worker = subprocess.run([sys.executable, "-c", hook], env=environment, capture_output=True, text=True)
    assert (worker.returncode, worker.stdout) == (0, "RESULT\n"), worker.stderr
    for option in ("-I", "-E"):
        words = [sys.executable, option, "-c", "print('RESULT')"]
        blind = subprocess.run(words, env=broken, capture_output=True, text=True)
        assert (blind.stdout, blind.stderr) == ("RESULT\n", "")


def test_a_copy_elsewhere_is_found_by_its_content(debug_run: Any, attached: Any) -> None:
    debug_run.write("pkg/work.py", "def f(x):\n    y = x\n    return y\n")
    debug_run.point("pkg/work.py:2")
    copy = debug_run.folder.parent / "copy"
    (copy / "pkg").mkdir(parents=True)
    (copy / "pkg/work.py").write_text((debug_run.folder / "pkg/work.py").read_text())
    (copy / "train.py").write_text("import pkg.work\nprint('RESULT', pkg.work.f(4))\n")
    started = debug_run.start(str(copy / "train.py"))
    stop = started.stops()[0]
    assert (stop.local_root, stop.remote_root) == (str(debug_run.folder), str(copy))
    attached(stop).leave()
    assert started.end()[0] == 0


def test_another_file_of_that_name_has_no_point_but_a_copy_that_differs_has(debug_run: Any) -> None:
    debug_run.write("pkg/work.py", "def f(x):\n    y = x\n    return y\n")
    debug_run.point("pkg/work.py:2")
    debug_run.set(wait_seconds=0.2)
    copy = debug_run.folder.parent / "copy"
    (copy / "pkg").mkdir(parents=True)
    (copy / "pkg/work.py").write_text("# changed\ndef f(x):\n    y = x\n    return y\n")
    (copy / "train.py").write_text("import pkg.work\nprint('RESULT', pkg.work.f(4))\n")
    said = debug_run.start(str(copy / "train.py")).end()[1]
    assert said == "RESULT 4\n"
    (copy / "train.py").write_text("import os\nos.chdir(os.path.dirname(__file__))\nimport pkg.work\npkg.work.f(4)\n")
    said = debug_run.start(str(copy / "train.py")).end()[1]
    assert "pkg/work.py is not the file that pkg/work.py:2 was given for: the copy differs, lines may be off" in said
    assert " stopped at " in said
