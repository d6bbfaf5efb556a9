"""The HTML report of align-check: findings first, the walk, plots; one file that runs nothing of what it shows."""

import base64
import json
import re

import browser
import numpy as np
import pytest

from vime.align.plots import bars, histogram, line, scatter, steps
from vime.align.walk import Check
from vime.report.align import align_page, overall
from vime.types import AlignReport, CheckResult, Verdict

needs_browser = pytest.mark.skipif(
    browser.program() is None, reason="no chromium, google-chrome or chrome is on PATH to open the page with"
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!-- ]]>"
GAPS = {"row 0": [0.0, 1e-6, np.nan], "row 1": [0.25, -2e-7]}
PLOTS = [
    scatter(
        "Gap of each token", GAPS, "token", "nats", at={"row 1": [3, 4]}, texts={"row 1": ['" the"', HOSTILE]},
        limit=1e-5, limit_text="float32",
    ),
    line("Error by layer", {"engine": [1e-7, 1e-6, None]}, "layer", "relative L2", limit=1e-5),
    bars("Terms", {"sampling": 0.2, "batch": 0.0}, "term", "nats", limit=0.1),
    steps("Memory", {"rank 0": [90, 110], "rank 1": [90, 120]}, ["0 train", "0 sync"], "phase", "MiB"),
    histogram("Log-probs", {"trainer": [-0.5, -1, -4]}, "nats", num_bins=7, limit=-1.0),
]  # fmt: skip
ABOUT = "Gap of each token. 4 values of nats from -2e-7 to 0.25, limit 1e-5; arrow keys go from one to the next."
CHECKS = [
    Check("weights", "3", "Both ends hold the same weights", "the guide's line", lambda _: None),
    Check("coherence", "5", "The rollout is human language", "", lambda _: None),
    Check("engine", "8", "Engine against trainer", "", lambda _: None, explained_by=("weights",)),
]
RESULTS = (
    CheckResult(
        "weights", Verdict.FAIL, "2 of 112 tensors differ", "0: bitwise", ("layer 2 holds layer 0's",),
        "no stage offset", "vime dump-weights --diff",
    ),
    CheckResult("coherence", Verdict.WARN, "1 of 16", "0", (HOSTILE,), HOSTILE, HOSTILE),
    CheckResult(
        "engine", Verdict.FAIL, "max 0.25 nats", "1e-5", follows="weights",
        numbers={"plots": [plot.as_dict() for plot in PLOTS], "max": 0.25, "bad": float("nan"), "gap_T": [0.5] * 20,
                 "worst": {"row": 1, "tokens": [3, 4]}},
    ),
    CheckResult("routing", Verdict.SKIP, cause="no experts"),
    CheckResult("gradients", Verdict.NOT_TESTED, cause="one process already"),
    CheckResult("size", Verdict.PASS, "mean -0.62"),
)  # fmt: skip
ENVIRONMENT = {"vllm": "0.32.0", "model": HOSTILE, "dtype": "float32", "layout": "tp 2"}
REPORT = AlignReport(RESULTS, ENVIRONMENT, {"weights": 12.34, "engine": 0.5})


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_holds_the_report():
    data = data_of(align_page(REPORT, CHECKS))
    assert data["verdict"] == "FAIL"
    assert data["summary"] == "1 finding · 2 FAIL, 1 WARN, 1 PASS, 1 NOT TESTED, 1 SKIP · 13 s"
    assert [name for name, _ in data["environment"]] == ["vllm", "dtype", "layout"]
    assert [(c["name"], c["step"]) for c in data["checks"][:4]] == [
        ("weights", "3"), ("coherence", "5"), ("engine", "8"), ("routing", ""),
    ]  # fmt: skip
    engine = data["checks"][2]
    assert engine["numbers"] == [
        ["max", 0.25], ["bad", "nan"], ["gap_T", "20 numbers from 0.5 to 0.5"], ["worst.row", 1],
        ["worst.tokens", "3, 4"],
    ]  # fmt: skip
    assert [plot["kind"] for plot in engine["plots"]] == ["scatter", "line", "bars", "steps", "histogram"]
    assert (engine["seconds"], data["checks"][3]["seconds"]) == (0.5, None)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ("", "NOT TESTED"), ("SKIP", "SKIP"), ("SKIP PASS", "PASS"), ("PASS WARN", "WARN"), ("WARN FAIL PASS", "FAIL"),
    ],
)  # fmt: skip
def test_the_verdict_of_the_whole(verdicts, whole):
    results = tuple(CheckResult(str(i), Verdict(v)) for i, v in enumerate(verdicts.split()))
    assert str(overall(AlignReport(results))) == whole


def test_the_page_may_fetch_nothing_and_nothing_of_a_sample_is_markup():
    html = align_page(REPORT, CHECKS)
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    assert "<!--" not in html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in html
    own = re.sub(r'<title>.*?</title>|id="data">.*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"<(link|iframe|object|embed)|innerHTML|eval\(|\bstyle=|\bon\w+=", own)


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Opens the page of REPORT, or of another one, at a view."""
    folder = tmp_path_factory.mktemp("page")

    def visit(view="", report=REPORT, then="", has_policy=True):
        """``then``: a script that is added at the end."""
        html = align_page(report, CHECKS)
        html = html if has_policy else html.replace("Content-Security-Policy", "x-none")
        path = folder / "x.html"
        path.write_text(html.replace("</body>", f"<script>{then}</script></body>"), encoding="utf-8")
        return browser.visit(path, view, folder / "profile")

    return visit


def noted(page):
    """What a script has put into the title."""
    return json.loads(base64.b64decode(re.search(r"<title>(.*?)</title>", page.html)[1]))


def note(steps):
    """A script that takes ``steps`` (name -> expression), each a moment after the other, and notes their values."""
    return f"""
      const pause = () => new Promise((resolve) => setTimeout(resolve, 100));
      const all = (selector, from = document) => [...from.querySelectorAll(selector)];
      const texts = (selector) => all(selector).map((e) => e.textContent);
      const shown = () => all('#walk > li').filter((e) => !e.hidden).map((e) => e.dataset.key);
      const press = (e, key) => e.dispatchEvent(new KeyboardEvent('keydown', {{ key, bubbles: true }}));
      const plot = (k) => document.querySelectorAll('#walk .plot')[k];
      const point = (k) => plot(k).querySelector('.pointed').textContent;
      (async () => {{
        const found = {{}};
        await pause();
        for (const [name, action] of {json.dumps([*steps.items()])}) {{
          try {{ found[name] = eval(action); }} catch (error) {{ found[name] = String(error); }}
          await pause();
        }}
        document.title = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
      }})();"""


@needs_browser
def test_findings_come_first_and_hostile_texts_are_not_run(visit):
    page = visit()
    assert page.texts["overall"] == "FAIL1 finding · 2 FAIL, 1 WARN, 1 PASS, 1 NOT TESTED, 1 SKIP · 13 s"
    assert page.texts["environment"] == "vllm0.32.0dtypefloat32layouttp 2"
    found = page.texts["findings"]
    assert found.startswith("1 findingFAILBoth ends hold the same weights3 weightsMeasured2 of 112 tensors differ")
    assert "Next stepvime dump-weights --diffExplains 8 engine" in found
    assert "1 warningWARNThe rollout is human language5 coherence" in found
    assert HOSTILE in found
    assert HOSTILE in page.texts["about"]
    assert "owned" not in re.search("<title>.*?</title>", page.html)[0].replace("='owned", "")
    assert "<img" not in page.html.replace("&lt;img", "")
    assert page.html.index('id="findings"') < page.html.index('id="walk"')


@needs_browser
def test_the_walk_in_a_browser(visit):
    steps = {
        "rows": "texts('#walk summary .measured')",
        "badges": "texts('#walk summary .badge')",
        "symbols": "all('#walk summary .badge').map((e) => e.dataset.symbol).join('')",
        "seconds": "texts('#walk .seconds')",
        "strip": "all('#strip a').map((e) => e.getAttribute('aria-label'))",
        "closed": "all('#walk details').some((e) => e.open)",
        "fail": "all('#filter button').find((e) => e.dataset.verdict === 'FAIL').click(), shown()",
        "pressed": "texts('#filter [aria-pressed=true]')",
        "counted": "$('count').textContent",
        "open": "document.querySelector('#walk [data-key=engine] summary').click()",
        "address": "location.hash",
        "body": "document.querySelector('#walk [data-key=engine] .body').textContent.slice(0, 60)",
        "to": "document.querySelector('#findings a').click(), location.hash",
        "focus": "document.activeElement.closest('[data-key]').dataset.key",
        "all": "document.querySelector('#filter button').click(), shown().length",
        "back": "location.hash = 'verdict=SKIP&open=routing'",
        "skipped": "[shown(), texts('#walk details[open] .said')]",
    }
    assert noted(visit(then=note(steps), has_policy=False)) == {
        "rows": [
            "2 of 112 tensors differ", "1 of 16", "max 0.25 nats", "no experts", "one process already", "mean -0.62",
        ],
        "badges": ["FAIL", "WARN", "FAIL", "SKIP", "NOT TESTED", "PASS"],
        "symbols": "✕!✕–?✓",
        "seconds": ["12 s", "", "0.5 s", "", "", ""],
        "strip": [
            "Both ends hold the same weights: FAIL", "The rollout is human language: WARN",
            "Engine against trainer: FAIL", "routing: SKIP", "gradients: NOT TESTED", "size: PASS",
        ],
        "closed": False,
        "fail": ["weights", "engine"],
        "pressed": ["✕ FAIL 2"],
        "counted": "2 of 6 checks",
        "address": "#verdict=FAIL&open=engine",
        "body": "A consequence, no finding of its own: follows from 3 weights",
        "to": "#verdict=FAIL&open=engine,weights",
        "focus": "weights",
        "all": 6,
        "back": "verdict=SKIP&open=routing",
        "skipped": [["routing"], ["Whyno experts"]],
    }  # fmt: skip


@needs_browser
def test_each_point_of_a_plot_is_reached_by_keys_and_by_mouse_and_stands_in_its_table(visit):
    focus = "plot({0}).querySelector('svg[role]').focus(), point({0})"
    steps = {
        "titles": "texts('#walk .plot figcaption')",
        "drawn": "all('#walk .plot svg[role]').map((e) => e.querySelectorAll('.dots, .curve, .bar, .area').length)",
        "limits": "texts('#walk .plot text.limit').filter((t) => t.startsWith('limit'))",
        "floor": "all('text', plot(0)).map((e) => e.textContent).includes('0')",
        "scatter": focus.format(0),
        "next": "press(document.activeElement, 'ArrowRight'), point(0)",
        "none": "press(document.activeElement, 'ArrowRight'), point(0)",
        "last": "press(document.activeElement, 'End'), point(0)",
        "line": focus.format(1),
        "bars": focus.format(2),
        "steps": focus.format(3),
        "histogram": focus.format(4),
        "mouse": """(() => {
            const area = plot(3).querySelector('svg[role]'), box = area.getBoundingClientRect();
            area.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 30, clientY: box.top }));
            return point(3);
        })()""",
        "about": "plot(0).querySelector('svg[role]').getAttribute('aria-label')",
        "tables": "all('#walk .plot details').forEach((e) => { e.open = true; })",
        "table": "all('tbody tr', plot(0)).map((e) => e.cells[1].textContent + ' ' + e.cells[3].textContent)",
        "bins": "all('tbody tr', plot(4)).map((e) => e.textContent)[0]",
        "notes": "texts('#walk .plot > .none')",
    }
    found = noted(visit("open=engine", then=note(steps), has_policy=False))
    assert found == {
        "titles": ["Gap of each token", "Error by layer", "Terms", "Memory", "Log-probs"],
        "drawn": [2, 2, 2, 2, 1],
        "limits": ["limit 1e-5, float32", "limit 1e-5", "limit 0.1", "limit -1"],
        "floor": True,
        "scatter": "row 0, token 0: 0 nats",
        "next": "row 0, token 1: 1e-6 nats",
        "none": "row 0, token 2: not finite nats",
        "last": f"row 1, token 4, {HOSTILE}: -2e-7 nats",
        "line": "layer 0: 1e-7 relative L2",
        "bars": "sampling: 0.2 nats",
        "steps": "rank 0, phase 0 train: 90 MiB",
        "histogram": "nats -4 to -3.5: 1 tokens",
        "mouse": "rank 1, phase 0 sync: 120 MiB",
        "about": ABOUT,
        "table": ["2 not finite", "3 0.25", "1 1e-6", "4 -2e-7", "0 0"],
        "bins": "-4 to -3.51",
        "notes": ["row 0: 1 not finite", "engine: 1 not finite"],
    }


@needs_browser
def test_no_check_and_ten_thousand_points(visit):
    page = visit(report=AlignReport(()))
    assert page.texts["overall"] == "NOT TESTEDno check was run"
    assert page.texts["count"] == "No check was asked for."
    many = scatter("gap", {"all": np.geomspace(1e-9, 1, 10_000)}, "token", "nats")
    empty = scatter("none", {"all": []}, "token", "nats")
    report = AlignReport((CheckResult("engine", Verdict.PASS, numbers={"plots": [many.as_dict(), empty.as_dict()]}),))
    found = noted(
        visit(
            "open=engine",
            report,
            note({
                "dots": "plot(0).querySelector('.dots').getAttribute('d').split('M').length - 1",
                "last": "plot(0).querySelector('svg[role]').focus(), press(document.activeElement, 'End'), point(0)",
                "empty": "plot(1).querySelector('svg[role]').focus(), point(1)",
                "table": "plot(0).querySelector('details').open = true",
                "rows": "[all('tbody tr', plot(0)).length, plot(0).querySelector('details .none').textContent]",
            }),
            has_policy=False,
        )
    )  # fmt: skip
    assert found == {
        "dots": 10_000, "last": "token 9999: 1 nats", "empty": "", "table": True,
        "rows": [1000, "the first 1000 of 10000"],
    }  # fmt: skip
