"""The debugger in the terminal, over real stopped processes and pipes."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from stops import SECONDS, STOP_LINE, a_stop, program, stop_of, stopped, vime, wait_for

from vime.debug.attach.dap import Dap, DapError
from vime.debug.attach.reach import check, listens
from vime.debug.stop.records import put_stop, stops
from vime.errors import UsageError

ABOUT = {"key": "trainer1-9c2e", "rank": 1}
SCRIPT = """\
w
locals
p a + b
p a +
p nope
exec a = 40
!b = 2
p [a, b]
!c = type('C', (), dict(__repr__=lambda self: 'of\\n   lines'))()
locals
up
p __name__
down
n
b {next}
b
clear
b {next} if total == 42
nonsense
s
p total, doubled
c
"""


@pytest.fixture
def stop(registry, tmp_path):
    """A process that has stopped, and its record."""
    with stopped(program(tmp_path), {"registry": registry.where, **ABOUT}) as process:
        yield process, stop_of(process, registry)


def test_a_script_reads_steps_and_changes_a_variable(stop, monkeypatch, tmp_path):
    process, _ = stop
    monkeypatch.chdir(tmp_path)
    done = vime("connect", "rank=1", "--terminal", stdin=SCRIPT.format(next=STOP_LINE + 2))
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert f"stopped (breakpoint) work.py:{STOP_LINE} add\n" in said
    assert f"-> {STOP_LINE}      total = a + b\n" in said
    assert f"> 0  work.py:{STOP_LINE} add\n" in said
    assert "(vime) locals\na = 2\nb = 3\n" in said
    assert "(vime) locals\na = 40\nb = 2\nc = of lines\n" in said
    assert "(vime) p a + b\n5\n" in said
    assert "error: SyntaxError" in said
    assert "error: NameError: name 'nope' is not defined\n" in said
    assert "(vime) p [a, b]\n[40, 2]\n" in said
    assert "'__main__'" in said
    assert f"breakpoint at work.py:{STOP_LINE + 2}\n" in said
    assert f"(vime) b\nwork.py:{STOP_LINE + 2}\n" in said
    assert "1 removed\n" in said
    assert "no such command: nonsense" in said
    assert "(42, 84)\n" in said
    assert said.endswith("(vime) c\nthe process has ended\n") or "has hung up: the process has ended" in said
    assert process.communicate(timeout=SECONDS)[0] == "result 84\n"


def test_the_end_of_the_input_detaches_and_the_process_runs_on(stop, registry):
    process, _ = stop
    done = vime("connect", "--terminal", stdin="p a\n")
    assert done.stdout.endswith("(vime) p a\n2\ndetached; the process runs on\n")
    assert process.communicate(timeout=SECONDS)[0] == "result 10\n"
    assert stops(registry) == []


@pytest.mark.parametrize("word", ["detach", "quit"])
def test_leaving_in_words(stop, word):
    process, _ = stop
    assert vime("connect", "--terminal", stdin=f"{word}\np 1\n").stdout.endswith("detached; the process runs on\n")
    assert process.communicate(timeout=SECONDS)[0] == "result 10\n"


def test_a_process_that_runs_is_paused_by_ctrl_c(registry, tmp_path):
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "connect", "--terminal"]
    with stopped(program(tmp_path), {"registry": registry.where, **ABOUT}, "--stay") as process:
        stop_of(process, registry)
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(iter(client.stdout.readline, "")), daemon=True)
        reader.start()
        client.stdin.write("c\n")
        client.stdin.flush()
        assert process.stdout.readline() == "result 10\n"
        wait_for(lambda: "(vime) c\n" in lines, "an answer")
        client.send_signal(signal.SIGINT)
        wait_for(lambda: any(line.startswith("pausing") for line in lines), "an answer")
        client.stdin.write("detach\n")
        client.stdin.close()
        assert client.wait(SECONDS) == 0
        reader.join(SECONDS)
        client.stdout.close()
        assert lines[-1] == "detached; the process runs on\n"
        assert process.poll() is None


def test_a_process_killed_meanwhile_is_said(registry, tmp_path):
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "connect", "--terminal"]
    with stopped(program(tmp_path), {"registry": registry.where, **ABOUT}) as process:
        stop_of(process, registry)
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while "total = a + b" not in client.stdout.readline():
            assert client.poll() is None
        process.kill()
        process.wait(SECONDS)
        said = client.communicate("p a\n", timeout=SECONDS)[0]
    assert client.returncode == 0
    assert "the process has ended" in said


def test_the_file_here_is_shown_for_its_copy_there(registry, tmp_path):
    """Case D18: the process runs a copy of the folder where the command was given."""
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    copy.mkdir()
    program(here)
    roots = {"local_root": str(here), "remote_root": str(copy)}
    with stopped(program(copy), {"registry": registry.where, **ABOUT, **roots}) as process:
        stop_of(process, registry)
        script = f"w\nb {here}/work.py:{STOP_LINE + 2}\nc\np total\n"
        said = vime("connect", "--terminal", stdin=script).stdout
    assert f"0  {here}/work.py:{STOP_LINE} add" in said
    assert f"stopped (breakpoint) {here}/work.py:{STOP_LINE + 2} add" in said
    assert "(vime) p total\n5\n" in said


def test_without_a_terminal_the_address_and_an_entry_for_vs_code(stop):
    """Case D05: an editor that lists nothing can still be told where to go."""
    _, found = stop
    done = vime("connect", "rank=1")
    assert done.returncode == 0
    assert done.stdout.startswith(f'127.0.0.1:{found.port}\n{{\n    "version": "0.2.0"')


def test_a_look_at_the_port_does_not_use_it_up(stop):
    process, found = stop
    for _ in range(3):
        check(found)
    with Dap(found.host, found.port) as client:
        client.attach()
        assert client.stopped()[1] == "breakpoint"
        client.detach()
    assert process.communicate(timeout=SECONDS)[0] == "result 10\n"


def test_a_closed_port_is_said_with_ways_around_it(registry):
    """Case D04."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens("127.0.0.1", port)
        assert not listens("127.0.0.2", port)
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as connection:
            assert not listens("127.0.0.1", client.getsockname()[1])  # in use, and nobody takes a connection there
            assert connection.getsockname()[1] == port
    put_stop(registry, a_stop("pod-1", port=port))
    done = vime("connect", "pod")
    assert done.returncode == 2
    assert f"nothing listens at 127.0.0.1:{port} although process {os.getpid()} lives" in done.stderr
    assert f"ssh -N -L {port}:127.0.0.1:{port} 127.0.0.1" in done.stderr
    assert f"kubectl port-forward pod/{a_stop().hostname} {port}:{port}" in done.stderr


def test_loopback_of_another_machine_is_not_tried(registry):
    """Case D04: its port may be open here too, and be somebody else's."""
    with pytest.raises(UsageError, match=r"listens at 127\.0\.0\.1:5678 of elsewhere \(10\.0\.0\.8\)") as error:
        check(a_stop("a", hostname="elsewhere", address="10.0.0.8"))
    assert "kubectl port-forward pod/elsewhere 5678:5678" in error.value.message


def test_an_adapter_takes_one_client(stop, registry):
    _, found = stop
    with Dap(found.host, found.port) as client:
        client.attach()
        client.stopped()
        held = wait_for(lambda: [s for s in stops(registry) if s.state == "attached"], "attached")
        done = vime("connect", held[0].key)
        assert done.returncode == 2
        assert "is attached to already" in done.stderr
        client.detach()


def test_an_adapter_that_lost_a_connection_is_said_and_its_process_goes_on(stop):
    """Why no port is tried by connecting to it."""
    process, found = stop
    socket.create_connection((found.host, found.port)).close()
    with Dap(found.host, found.port, 3) as client, pytest.raises(DapError, match="does not answer") as error:
        client.attach()
    assert "vime debug-attach resume" in error.value.hint
    assert vime("resume", found.key).returncode == 0
    assert process.communicate(timeout=SECONDS)[0] == "result 10\n"


def test_nobody_there_is_an_error_in_one_line():
    with pytest.raises(DapError, match=r"nothing listens at 127\.0\.0\.1:1"):
        Dap("127.0.0.1", 1)


def test_options_that_do_not_go_together(registry):
    assert vime("connect", "--terminal", "--launch-json").returncode == 2
    assert "nothing is stopped" in vime("connect").stderr


def test_entries_for_vs_code_from_the_command(stop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = vime("connect", "--launch-json")
    assert (done.returncode, done.stdout) == (0, "")
    assert "wrote .vscode/launch.json: vime: trainer 1 (trainer1-9c2e)" in done.stderr
    content = (tmp_path / ".vscode" / "launch.json").read_text()
    assert vime("connect", "--launch-json", "-").stdout == content
    commented = tmp_path / "mine.json"
    commented.write_text("// mine\n" + content)
    refused = vime("connect", "rank=1", "--launch-json", "mine.json")
    assert (refused.returncode, refused.stdout) == (2, content)
    assert 'paste the entries below into its "configurations"' in refused.stderr
    assert commented.read_text() == "// mine\n" + content
