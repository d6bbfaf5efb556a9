"""The page of the differences of two dumps: permuted layers at a glance, every tensor found by name and kind."""

import base64
import json
import re

import browser
import pytest
import torch

from vime.report.weights import SYMBOLS, weights_page
from vime.weights.compare import Kind, diff
from vime.weights.manifest_file import Dump
from vime.weights.values import record_of

needs_browser = pytest.mark.skipif(
    browser.program() is None, reason="no chromium, google-chrome or chrome is on PATH to open the page with"
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!-- ]]>"
KINDS = {"self_attn.q_proj": (4, 4), "mlp.down_proj": (4, 8), "input_layernorm": (4,)}


def right():
    torch.manual_seed(0)
    names = {f"model.layers.{i}.{kind}.weight": shape for i in range(4) for kind, shape in KINDS.items()}
    names |= {f"model.layers.3.mlp.experts.{e}.up_proj.weight": (2, 4) for e in range(4)}
    names |= {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}
    return {name: torch.randn(shape) for name, shape in names.items()}


def wrong():
    """Layer 2 holds layer 0, one tensor has another value, one is missing, experts 2 and 3 hold 0 and 1."""
    held = {name: tensor.clone() for name, tensor in right().items()}
    for kind in KINDS:
        held[f"model.layers.2.{kind}.weight"] = held[f"model.layers.0.{kind}.weight"]
    for expert in (2, 3):
        held[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"] = held[
            f"model.layers.3.mlp.experts.{expert - 2}.up_proj.weight"
        ]
    held["model.layers.1.self_attn.q_proj.weight"] = held["model.layers.1.self_attn.q_proj.weight"] + 0.5
    del held["model.layers.3.input_layernorm.weight"]
    held["lm_head.weight"][0, 0] = torch.nan
    return held


def dump(origin, tensors, **about):
    records = {name: record_of(name, tensor) for name, tensor in tensors.items()}
    return Dump(0, origin, records, family="qwen3", **about)


def page_of(held=None, has_tensors=True):
    a, b = right(), wrong() if held is None else held
    readers = (a.__getitem__, b.__getitem__) if has_tensors else ()
    return weights_page(diff(dump("checkpoint", a), dump("engine-held", b, layout=HOSTILE), *readers))


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_every_kind_of_difference_has_a_sign():
    assert SYMBOLS.keys() == set(Kind)


def test_the_page_holds_the_differences():
    data = data_of(page_of())
    tensors = {t["name"]: t for t in data["tensors"]}
    assert (data["title"], data["is_equal"]) == ("weights: engine-held against checkpoint", False)
    assert ["num_tensors", "18", "17"] in data["sides"]
    moved = tensors["model.layers.2.mlp.down_proj.weight"]
    assert (moved["kind"], moved["layer"], moved["partner_layer"], moved["column"]) == (
        "swapped",
        2,
        0,
        "mlp.down_proj",
    )
    value = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert value["max_abs"] == pytest.approx(0.5, rel=1e-5)
    assert tensors["model.layers.3.mlp.experts.2.up_proj.weight"]["column"] == "mlp.experts.*.up_proj"
    assert tensors["lm_head.weight"]["max_abs"] in ("inf", "nan")
    assert {"name": "permuted layers", "symbol": "→", "group": "permuted"} in data["kinds"]
    assert "max_abs" not in tensors["model.layers.0.mlp.down_proj.weight"]


def test_the_page_may_fetch_nothing_and_nothing_of_a_manifest_is_markup():
    html = page_of()
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    assert "unsafe" not in html
    assert not re.search(r"https?:", html.replace("http://www.w3.org/2000/svg", ""))
    own = re.sub(r'id="data">.*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"<(link|iframe|object|embed)|innerHTML|eval\(|\bstyle=|\bon\w+=", own)


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """What each of some scripts finds, one after the other, in a page without its policy."""
    folder = tmp_path_factory.mktemp("page")

    def noted(html, steps, view=""):
        script = f"""
          const pause = () => new Promise((resolve) => setTimeout(resolve, 60));
          const all = (selector) => [...document.querySelectorAll(selector)];
          const texts = (selector) => all(selector).map((e) => e.textContent);
          const short = (name) => name.replace('model.', '').replace('.weight', '');
          const shown = () => all('#table tbody tr').map((e) => short(e.dataset.key));
          const chip = (kind) => all('#filter button').find((e) => e.dataset.kind === kind).click();
          const cells = (k) => [...$('grid').tBodies[0].rows[k].cells].map((e) => e.textContent);
          (async () => {{
            const found = {{}};
            for (const [name, action] of {json.dumps([*steps.items()])}) {{
              try {{ found[name] = eval(action); }} catch (error) {{ found[name] = String(error); }}
              await pause();
            }}
            document.title = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
          }})();"""
        html = html.replace("Content-Security-Policy", "x-none").replace("</body>", f"<script>{script}</script></body>")
        (folder / "x.html").write_text(html, encoding="utf-8")
        page = browser.visit(folder / "x.html", view, folder / "profile")
        return json.loads(base64.b64decode(re.search(r"<title>(.*?)</title>", page.html)[1]))

    return noted


@needs_browser
def test_a_permuted_layer_is_seen_at_a_glance(noted):
    steps = {
        "overall": "$('overall').textContent",
        "columns": "texts('#grid thead th')",
        "grid": "[0, 1, 2, 3, 4, 5].map(cells)",
        "groups": "[...$('grid').tBodies[0].rows[2].cells].map((e) => e.className)",
        "said": "document.querySelector('#grid tbody tr:nth-child(3) button').getAttribute('aria-label')",
        "experts": "$('grid').tBodies[0].rows[3].cells[4].title",
        "layout": "$('sides').textContent.includes('<img')",
        "findings": "texts('.finding p').filter((t) => t.includes('layer')).slice(0, 2)",
    }
    found = noted(page_of(), steps)
    assert found["overall"].startswith("✕ DIFFERENTengine-held against checkpoint: 10/18 tensors bitwise equal; ")
    assert found["columns"] == ["", *KINDS, "mlp.experts.*.up_proj"]
    assert found["grid"] == [
        ["layer 0", "✓", "✓", "✓", ""], ["layer 1", "≠", "✓", "✓", ""], ["layer 2", "→0", "→0", "→0", ""],
        ["layer 3", "✓", "✓", "∅", "⇄"], ["embed_tokens", "✓", ""], ["lm_head", "!", ""],
    ]  # fmt: skip
    assert found["groups"] == ["", "g-permuted", "g-permuted", "g-permuted", "is-absent"]
    assert found["said"] == "layer 2, self_attn.q_proj: swapped, holds model.layers.0.self_attn.q_proj.weight"
    assert found["experts"].startswith("layer 3, mlp.experts.*.up_proj: swapped, 2 of 4 tensors, holds ")
    assert found["layout"] is True
    assert any("layer 2 holds layer 0's tensors" in text for text in found["findings"])


@needs_browser
def test_filter_by_name_and_kind_in_the_address(noted):
    cell = "document.querySelector('#grid tbody tr:nth-child({}) button').click()"
    steps = {
        "first": "[shown().length, $('count').textContent, texts('#filter [aria-pressed=true]')]",
        "kind": "chip('missing'), [shown(), location.hash]",
        "all": "chip('all'), shown().length",
        "words": "change({ q: 'LAYERS.3 experts', kind: 'swapped' }), shown()",
        "cell": cell.format(3) + ", [shown(), location.hash]",
        "expert": cell.format(4).replace("button", "td:nth-child(5) button") + ", [shown(), view.q]",
        "finding": "all('.finding button').find((e) => e.textContent === '3 tensors').click(), view.q",
        "sorted": "change({ q: '', sort: 'gap' }), shown()[0]",
        "plot": "texts('#plot .plot figcaption')",
        "back": "location.hash = 'q=lm_head'",
        "read": "[shown(), $('filters').elements.q.value]",
        "none": "change({ q: 'nothing' }), $('count').textContent",
    }
    found = noted(page_of(), steps)
    assert found["first"] == [8, "8 of 18 tensors", ["different 8"]]
    assert found["kind"] == [["layers.3.input_layernorm"], "#kind=missing"]
    assert found["all"] == 18
    assert found["words"] == [f"layers.3.mlp.experts.{e}.up_proj" for e in (2, 3)]
    assert found["cell"] == [["layers.2.self_attn.q_proj"], "#q=model.layers.2.+self_attn.q_proj"]
    assert found["expert"] == [
        [f"layers.3.mlp.experts.{e}.up_proj" for e in (2, 3)], "model.layers.3. mlp.experts up_proj",
    ]  # fmt: skip
    assert found["finding"] == "model.layers.2."
    assert found["sorted"].startswith("layers.")
    assert found["plot"] == ["Largest differences"]
    assert found["read"] == [["lm_head"], "lm_head"]
    assert found["none"] == "0 of 18 tensors"


@needs_browser
def test_equal_dumps_manifests_alone_and_many_tensors(noted):
    found = noted(
        page_of(right()),
        {"overall": "$('overall').textContent", "shown": "[shown().length, $('findings').textContent]"},
    )
    assert found["overall"] == "✓ EQUALengine-held = checkpoint: 18/18 tensors bitwise equal"
    assert found["shown"] == [18, ""]
    alone = page_of(has_tensors=False)
    heads = {"heads": "texts('#table th')", "plot": "$('plot').textContent", "empty": "$('notes').hidden"}
    assert noted(alone, heads) == {
        "heads": ["tensor", "difference", "l2 of a", "l2 of b", "shape", "dtype"], "plot": "", "empty": True,
    }  # fmt: skip
    tensors = {
        f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": torch.full((2,), i + e / 100)
        for i in range(6)
        for e in range(50)
    }
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    many = weights_page(diff(dump("a", tensors), dump("b", other)))
    steps = {
        "first": "shown().length",
        "more": "$('more').click(), [shown().length, $('more').hidden]",
        "rows": "$('grid').rows.length",
    }
    assert noted(many, steps) == {"first": 200, "more": [300, True], "rows": 7}
