"""A dashboard that refuses, or goes away: Ray's own client of jobs, and a web server that answers as one."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from vime.debug.launch import job as submit
from vime.debug.launch.job import SubmittedJob
from vime.debug.launch.plan import Asked, plan
from vime.errors import UsageError, VimeError

VERSION = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}


class Dashboard(BaseHTTPRequestHandler):
    """Takes every job, and says nothing of it."""

    status = 200

    def do_GET(self):
        self.answer(VERSION)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"submission_id": "raysubmit_1", "job_id": "raysubmit_1"})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def planned(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return plan(Asked(command=(sys.executable, "work.py"), submit=f"http://127.0.0.1:{server.server_port}"), {})


@pytest.mark.parametrize("status", [401, 403])
def test_a_dashboard_that_wants_a_token(planned, monkeypatch, status):
    """Case D20."""
    monkeypatch.setattr(Dashboard, "status", status)
    with pytest.raises(VimeError, match="token needed") as raised:
        SubmittedJob.start(planned, print, print)
    assert "RAY_AUTH_TOKEN" in raised.value.hint


def test_what_is_no_dashboard(planned, monkeypatch):
    monkeypatch.setattr(Dashboard, "status", 500)
    with pytest.raises(UsageError, match="no jobs can be submitted"):
        SubmittedJob.start(planned, print, print)


def test_a_dashboard_that_goes_away_is_said_and_not_asked_for_more(planned, server, monkeypatch):
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.0)
    job = SubmittedJob.start(planned, print, print)
    server.shutdown()
    server.server_close()
    with pytest.raises(VimeError, match="does not answer any more") as raised:
        job.ended()
    assert "ray job stop raysubmit_1" in raised.value.hint
    job.close()


@pytest.mark.parametrize(
    ("status", "code", "message", "said"),
    [
        ("SUCCEEDED", 0, "done", ""),
        ("FAILED", 3, "Job entrypoint failed", "job j FAILED, exit code 3"),
        ("FAILED", None, "The supervisor died\nand more", "job j FAILED: The supervisor died"),
        ("STOPPED", None, "", "job j STOPPED"),
        ("STOPPED", None, None, "job j STOPPED"),
    ],
)
def test_what_ended_a_job(planned, status, code, message, said):
    details = SimpleNamespace(status=status, driver_exit_code=code, message=message)
    assert SubmittedJob(planned, None, "j", print, print, _details=details).failure() == said
