"""The HTML page of samples: one file that needs nothing and runs nothing of a sample; seen in a real browser."""

import base64
import json
import re

import browser
import numpy as np
import pytest

from vime.record import write
from vime.report.page import embedded
from vime.report.samples import NOT_FINITE, NOT_SAMPLED, write_html
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

needs_browser = pytest.mark.skipif(
    browser.program() is None, reason="no chromium, google-chrome or chrome is on PATH to open the page with"
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!-- ]]>"


def sample(group_id, index, response_len, **changes):
    """Two prompt tokens; of the response the log-probs are -1, -2, ...; its third token is a tool's."""
    n = 2 + response_len
    mask = np.array([i >= 2 and i != 4 for i in range(n)])
    log_probs = np.where(mask, -np.arange(n) + 1.0, 0)
    fields = {"text": f"answer {group_id}", "prompt_text": f"<s>What is {group_id}+1?</s>", **changes}
    return Sample(group_id, index, np.arange(n) + 10, 2, mask, log_probs, **fields)


SAMPLES = [
    sample(1, 0, 3, reward=0.5),
    sample(1, 1, 6, reward=1.0, status=Status.TRUNCATED, text="goes on and on"),
    sample(2, 0, 1, reward=-2.0, label="three"),
    sample(2, 1, 0, status=Status.FAILED, metadata={"cause": "engine"}),
    sample(3, 1, 5, reward=0.0, status=Status.TRUNCATED, text=HOSTILE, label=HOSTILE, metadata={HOSTILE: HOSTILE}),
]


def save(path, *samples, rollout_id=0, more=()):
    header = RolloutHeader(model={"path": HOSTILE}, sampling={"temperature": 1.0})
    batches = [RolloutBatch.from_samples(rollout_id, samples, header), *more]
    assert write_html(path, [(b, range(len(b))) for b in batches], "data_0.pt") == sum(map(len, batches))
    return path


def data_of(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_holds_every_sample(tmp_path):
    found = data_of(save(tmp_path / "x.html", *SAMPLES))
    columns = found["columns"]
    assert columns["group_id"] == [1, 1, 2, 2, 3]
    assert columns["reward"] == [0.5, 1.0, -2.0, None, 0.0]
    assert [found["statuses"][i] for i in columns["status"]] == [str(s.status) for s in SAMPLES]
    assert [found["prompts"][i] for i in columns["prompt"]] == [s.prompt_text for s in SAMPLES]
    assert columns["text"] == [s.text for s in SAMPLES]
    tokens = np.frombuffer(base64.b64decode(found["tokens"]), "<u4")
    ids = [found["token_ids"][t] for t in tokens]
    assert ids == [i for s in SAMPLES for i in s.token_ids[2:].tolist()]
    steps = np.frombuffer(base64.b64decode(found["log_probs"]), "<u2").tolist()
    assert steps[:3] == [1000, 2000, NOT_SAMPLED]
    assert found["rollouts"][0]["statistics"]["truncated_ratio"] == 0.4


def test_log_probs_that_are_no_number_or_very_low(tmp_path):
    failed = sample(0, 0, 4, status=Status.ABORTED)
    failed.rollout_log_probs[2:] = [np.nan, -1e9, 0, 1e-7]
    found = data_of(save(tmp_path / "x.html", failed))
    steps = np.frombuffer(base64.b64decode(found["log_probs"]), "<u2").tolist()
    assert steps == [NOT_FINITE, 65000, NOT_SAMPLED, 0]
    assert found["columns"]["mean_log_prob"] == [None]


@needs_browser
def test_numbers_that_a_script_would_round_or_that_are_too_low_to_tell(visit):
    foreign = sample(0, 0, 2, seed=2**62 + 1)
    foreign.rollout_log_probs[2:] = [-80.0, -1.0]
    page = visit("open=0/0", [foreign])
    assert str(2**62 + 1) in page.texts["facts"]
    assert "≤ -65.000" in page.texts["least"]
    assert "-1.000" in page.texts["least"]


def test_no_samples(tmp_path):
    assert data_of(save(tmp_path / "x.html"))["columns"]["text"] == []


def test_nothing_of_a_sample_can_end_the_data(tmp_path):
    html = save(tmp_path / "x.html", *SAMPLES).read_text(encoding="utf-8")
    assert html.count("</script>") == 2
    assert html.count("<script") == 2
    assert "<img" not in html
    assert "<!--" not in html
    for text in (HOSTILE, "a\u2028b", "\ud800", "&lt;", "]]>"):
        assert json.loads(embedded({"x": text})) == {"x": text}
        assert not set("<>&") & set(embedded(text))
    with pytest.raises(ValueError):
        embedded(float("nan"))


def test_the_page_may_fetch_nothing_and_run_its_own_script_alone(tmp_path):
    html = save(tmp_path / "x.html", *SAMPLES[:3]).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in html
    own = re.sub(r'id="data">.*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"<(link|iframe|object|embed)|innerHTML|eval\(|\bstyle=|\bon\w+=", own)


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Opens the page of SAMPLES, or of other ones, at a view."""
    folder = tmp_path_factory.mktemp("page")

    def visit(view="", samples=SAMPLES, then="", has_policy=True, **rest):
        """``then``: a script that is added at the end."""
        path = folder / "x.html"
        path.unlink(missing_ok=True)
        save(path, *samples, **rest)
        html = path.read_text(encoding="utf-8")
        html = html if has_policy else html.replace("Content-Security-Policy", "x-none")
        path.write_text(html.replace("</body>", f"<script>{then}</script></body>"), encoding="utf-8")
        return browser.visit(path, view, folder / "profile")

    return visit


def keys(page):
    return [row["key"] for row in page.rows]


@needs_browser
def test_the_table_in_a_browser(visit):
    page = visit()
    assert keys(page) == ["1/0", "1/1", "2/0", "2/1", "3/1"]
    assert page.texts["count"] == "5 samples"
    row = page.rows[1]
    assert (row["status"], row["reward"], row["response_len"], row["prompt"]) == ("truncated", "1", "6", "What is 1+1?")
    assert page.rows[3]["reward"] == "-"
    assert page.texts["numbers"].startswith("mean reward-0.125truncated40.0 %")
    assert "reward -2: 1 of 1 samples" in page.texts["histogram"]
    assert page.attributes["pages"].get("hidden") == ""
    assert "open" not in page.attributes["sample"]


VIEWS = {
    "": ["1/0", "1/1", "2/0", "2/1", "3/1"],
    "status=truncated": ["1/1", "3/1"],
    "q=GOES+ON": ["1/1"],
    "q=three": ["2/0"],
    "q=engine": ["2/1"],
    "q=nothing+of+that": [],
    "rmin=0&rmax=0.5": ["1/0", "3/1"],
    "lmin=3&lmax=5": ["1/0", "3/1"],
    "status=truncated&rmin=0.5": ["1/1"],
    "sort=-reward": ["1/1", "1/0", "3/1", "2/0", "2/1"],
    "sort=reward": ["2/0", "3/1", "1/0", "1/1", "2/1"],
    "sort=-sample&status=truncated": ["3/1", "1/1"],
}


def answers(page):
    """What a script of ``each`` has found: key -> value."""
    return json.loads(base64.b64decode(re.search(r"<title>(.*?)</title>", page.html)[1]))


def each(steps):
    """A script that takes ``steps`` (name -> script), each from the plain view, and notes ``note()`` after it."""
    return f"""
      const pause = () => new Promise((resolve) => setTimeout(resolve, 150));
      (async () => {{
        const noted = {{}};
        for (const [name, action] of {json.dumps([*steps.items()])}) {{
          history.replaceState(null, "", "#"); readAddress(); show();
          try {{ new Function(action)(); }} catch (error) {{ noted[name] = String(error); continue; }}
          await pause();
          noted[name] = note();
        }}
        document.title = btoa(JSON.stringify(noted));
      }})();"""


@needs_browser
def test_filter_and_sort_from_the_address(visit):
    note = "const note = () => [...document.querySelectorAll('tbody tr[data-key]')].map((row) => row.dataset.key);"
    steps = {view: f"location.hash = {json.dumps(view)}" for view in VIEWS}
    assert answers(visit(then=note + each(steps), has_policy=False)) == VIEWS


@needs_browser
def test_a_view_is_there_from_the_first_moment(visit):
    page = visit("status=truncated&sort=-reward")
    assert keys(page) == ["1/1", "3/1"]
    assert page.texts["count"] == "2 of 5 samples"
    assert (page.sort["reward"], page.sort["status"]) == ("descending", "none")


@needs_browser
def test_a_sample_opens_with_its_strip(visit):
    page = visit("sort=-reward&open=1/1")
    assert page.attributes["sample"].get("open") == ""
    assert page.texts["sample-name"] == "Sample 1/1"
    assert page.texts["prompt"] == "<s>What is 1+1?</s>"
    # p: 0.37, 0.14, (tool), 0.018, 0.0067, 0.0025
    assert page.strip == [
        ("b2", "[12]"),
        ("b2", "[13]"),
        ("masked", "[14]"),
        ("b3", "[15]"),
        ("b4", "[16]"),
        ("b4", "[17]"),
    ]
    assert re.sub(r"\s+", "", page.texts["least"]).startswith('tokenidtextlog-probp517"[17]"-6.0000.002479')
    assert "Ids instead of texts" in page.texts["token"]


@needs_browser
def test_hostile_texts_are_shown_and_not_run(visit):
    page = visit("open=3/1")
    assert "<title>data_0.pt - samples</title>" in page.html
    assert HOSTILE in page.texts["facts"]
    assert page.texts["text"] == HOSTILE
    assert "<img" not in page.html.replace("&lt;img", "")


@needs_browser
def test_a_script_that_got_in_all_the_same_is_not_run(visit):
    planted = "document.title = 'owned'"
    assert "<title>data_0.pt - samples</title>" in visit(then=planted).html
    assert "<title>owned</title>" in visit(then=planted, has_policy=False).html


ACTIONS = {
    "$('table').tHead.querySelector('[data-name=reward] button').click()": "#sort=reward",
    "for (let i = 0; i < 2; i++) document.querySelector('th[data-name=reward] button').click()": "#sort=-reward",
    "for (let i = 0; i < 3; i++) document.querySelector('th[data-name=reward] button').click()": "",
    "document.querySelector('tr[data-key=\"2/0\"] td').click()": "#open=2/0",
    "change({q: 'three', status: 'failed'}); form.reset()": "",
    "document.querySelector('#histogram g').dispatchEvent(new MouseEvent('click'))": "#rmin=-2&rmax=-2",
    "form.elements.q.value = 'on'; form.dispatchEvent(new Event('input'))": "#q=on",
    "change({open: '1/1'}); $('close').click()": "",
    "change({open: '1/1'}); key('j')": "#open=2/0",
    "change({open: '1/1'}); key('k')": "#open=1/0",
    "change({open: '1/0'}); key('k')": "#open=1/0",
    "change({status: 'truncated', open: '1/1'}); key('j')": "#status=truncated&open=3/1",
    "change({open: '1/1'}, true); history.back()": "",
}


@needs_browser
def test_what_is_done_stands_in_the_address(visit):
    """Case P11: each action of mouse and keyboard, and that a sample is open exactly if the address says so."""
    given = """
      window.key = (name) => document.body.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true }));
      const note = () => [location.hash, $('sample').open];"""
    found = answers(visit(then=given + each({action: action for action in ACTIONS}), has_policy=False))
    assert found == {action: [address, "open" in address] for action, address in ACTIONS.items()}


@needs_browser
def test_a_token_that_is_pointed_at_is_described(visit):
    point = "document.querySelectorAll('#strip span')[4].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    page = visit("open=1/1", then=point, has_policy=False)
    assert page.texts["token"] == 'response token 4, id 16, "[16]": log-prob -5.000 nats, p 0.006738'


@needs_browser
def test_thousands_of_samples_are_drawn_a_page_at_a_time(visit):
    many = [sample(i, 0, i % 7, reward=i / 1000) for i in range(3000)]
    page = visit("page=3&sort=-reward", many)
    assert keys(page) == [f"{i}/0" for i in range(2899, 2849, -1)]
    assert page.texts["page"] == "page 3 of 60"
    page = visit("page=99&lmin=6", many)
    assert page.texts["page"] == "page 9 of 9"
    assert page.texts["count"] == "428 of 3000 samples"


@needs_browser
def test_several_rollouts(visit):
    more = [RolloutBatch.from_samples(7, [sample(1, 0, 2, reward=1.0)])]
    page = visit("open=7:1/0", more=more)
    assert keys(page)[-1] == "7:1/0"
    assert page.texts["sample-name"] == "Sample 1/0, rollout 7"
    assert keys(visit("rollout=7", more=more)) == ["7:1/0"]


@needs_browser
def test_an_export_of_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from vime_cli.app import app

    monkeypatch.chdir(tmp_path)
    write("data_0.pt", RolloutBatch.from_samples(0, SAMPLES))
    call = ["replay", "--inspect", "data_0.pt", "--where", "reward >= 0", "--export", "html"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    page = browser.visit(tmp_path / "data_0.html", "sort=reward", tmp_path / "profile")
    assert keys(page) == ["3/1", "1/0", "1/1"]
    assert "3 of 5 samples (chosen with --where)" in page.texts["about"]
