"""The page of a search for a crash: one file, which runs nothing of what it shows."""

import json
import re

import browser
import pytest

from vime.report.crash import crash_page

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TABLES = [
    ("attempts", ("#", "outcome"), [("1", "crashed"), ("2", "survived")]),
    ("smallest requests", ("sample", "prompt"), [("0/1", HOSTILE)]),
]
PAGE = crash_page("CRASH", "model", [("verdict", "CRASH: crashed in 3 of 3"), ("reproduce", "vime rollout x")], TABLES)


def test_the_page_holds_the_report_and_fetches_nothing():
    data = json.loads(re.search(r'id="data">(.*?)</script>', PAGE, re.DOTALL)[1])
    assert data["rows"][0] == ["verdict", "CRASH: crashed in 3 of 3"]
    assert [t["title"] for t in data["tables"]] == ["attempts", "smallest requests"]
    assert data["tables"][1]["rows"] == [["0/1", HOSTILE]]
    assert PAGE.count("<script") == PAGE.count("</script>") == 2
    assert "<img" not in PAGE
    assert "innerHTML" not in PAGE


@pytest.mark.skipif(browser.program() is None, reason="no chromium or chrome is on PATH to open the page with")
def test_in_a_browser(tmp_path):
    path = tmp_path / "x.html"
    path.write_text(PAGE, encoding="utf-8")
    page = browser.visit(path, "", tmp_path / "profile")
    assert page.texts["verdict"] == "CRASH"
    assert "vime rollout x" in page.html
    assert "<title>crash - model</title>" in page.html
