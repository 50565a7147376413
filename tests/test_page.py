"""The page of a tape: what is in the file, read without a browser; then the file opened and stepped in Chromium."""

import base64
import json
import os
import re
import shutil
from importlib import resources

import numpy as np
import pytest
from conftest import kernels, or_skip

import minigrad as mg
import minigrad.functional as F
from minigrad import nn
from minigrad.backend.random import get_rng_state
from minigrad.study import page

# What would break out of a page that put texts in as markup; a lone surrogate is no UTF-8.
NASTY = ["</script>", "<b>", "\"'", "&amp;", "🙂", "\ud800"]


def gpt(**fields):
    """A tape of one step of a two-layer GPT: 6 positions, sizes large enough for pictures and for numbers in full."""
    model = nn.Transformer(**dict(vocab_size=11, context=8, d_model=16, n_layers=2, n_heads=2) | fields)
    ids = np.arange(12).reshape(2, 6) % 11
    with mg.Tape() as tape:
        model.loss(ids, (ids + 1) % 11).backward()
    return tape


@pytest.fixture(scope="module")
def tape():
    mg.manual_seed(0)
    with kernels():
        return gpt()


def data(text):
    """The JSON of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))


def values(s):
    """A snapshot of the page as numbers: its own, or its picture."""
    if "values" in s:
        return np.array([float(v) for v in s["values"]])
    cells = np.frombuffer(base64.b64decode(s["cells"]), np.int8).astype(float).reshape(s["rows"], s["columns"])
    return np.where(cells == -128, np.nan, cells / 127 * s["top"])


# --------------------------------------------------------------------------------------------------- in the file


def test_one_file_without_network(tape, tmp_path):
    """No address to load from but the name of SVG, a policy that forbids loading, and nothing left unfilled."""
    tape.html(tmp_path / "tape.html")
    text = (tmp_path / "tape.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<link|<iframe|\ssrc=|@import|url\(|fetch\(|XMLHttp|import\(", text)
    assert "default-src 'none'" in text and "{{" not in text
    assert len(re.findall("<script", text)) == len(re.findall("</script", text)) == 2


@pytest.mark.parametrize("composed", [False, True])
def test_a_two_layer_transformer_stays_small(composed):
    """500 kB also where most arrays are pictures of full size, and where every line of the mathematics is a node."""
    with mg.composed() if composed else kernels():
        tape = gpt(d_model=64, n_heads=4, vocab_size=100)
    assert len(page.render(tape)) < 500_000


def test_every_node_has_formula_and_line(tape):
    made = data(page.render(tape))
    here = f"test_page.py:{gpt.__code__.co_firstlineno + 5}"
    assert len(made["nodes"]) == len(tape.records) > 50
    for node, r in zip(made["nodes"], tape.records):
        assert made["ops"][node["op"]]["formula"] == r.formula and r.formula
        assert node["line"].endswith(here) and node["code"] == "model.loss(ids, (ids + 1) % 11).backward()"
        assert (node["op"], node["module"], node["kept"]) == (r.name, r.module, r.bytes_kept)


def test_values_are_those_of_the_tape(tape):
    """Numbers to eight digits; pictures to half a step of 1/127 of their largest cell."""
    made = data(page.render(tape))
    told = [(node["value"], r.value) for node, r in zip(made["nodes"], tape.records)]
    told += [(leaf["gradient"], of.gradient) for leaf, of in zip(made["leaves"], tape.leaves)]
    told += [(pull["ct"], p.ct) for pull, p in zip(made["pulls"], tape.pulls)]
    told += [(out["ct"], r.ct) for pull, p in zip(made["pulls"], tape.pulls)
             for out, r in zip(pull["results"], p.results)]
    assert {s.whole for _, s in told} == {True, False}
    for number, s in told:
        shown = made["snapshots"][number]
        assert shown["shape"] == list(s.shape) and shown["dtype"] == str(s.dtype)
        for name in ("min", "mean", "max", "norm"):
            assert shown[name] == pytest.approx(getattr(s, name), rel=1e-7, abs=1e-300)
        got = values(shown)
        assert abs(got - s.values.reshape(got.shape)).max() <= (1e-7 if s.whole else 0.502 / 127) * abs(s.values).max()


def test_rules_go_with_their_arguments(tape):
    made = data(page.render(tape))
    for pull, p in zip(made["pulls"], tape.pulls):
        assert (pull["node"], pull["op"]) == (p.number, p.name)
        for out, r in zip(pull["results"], p.results):
            assert out["to"] == list(r.target) and out["axes"] == list(r.axes) and out["added"] == r.added
            assert out["rule"].startswith(f"ct_{out['argument']} = ")
    assert made["ops"]["layer_norm"]["rule"][0] == "with g = ct weight"      # shared by the lines after it


def test_steps_are_in_order_of_time():
    """Two training steps: forward, backward, forward, backward; and what is held then."""
    x = mg.tensor([1.0, 2.0], requires_grad=True)
    with mg.Tape() as tape:
        for _ in range(2):
            (x * x).sum().backward()
    assert data(page.render(tape))["steps"] == [
        [0, 0, 8], [0, 1, 8], [1, 0, 8], [1, 1, 0], [0, 2, 8], [0, 3, 8], [1, 2, 8], [1, 3, 0]]


def test_not_finite():
    """JSON has no NaN: they are words in small arrays, and cells without a colour in pictures."""
    x = mg.tensor([np.nan, -np.inf, 1.0], requires_grad=True)
    big = np.ones((40, 40))
    big[0, 0] = np.nan
    with mg.Tape() as tape:
        F.negative(x)
        F.negative(mg.tensor(big, requires_grad=True))
    made = data(page.render(tape))
    small, large = (made["snapshots"][node["value"]] for node in made["nodes"])
    assert small["values"] == ["nan", "inf", -1.0] and (small["nans"], small["infs"]) == (1, 1)
    assert np.isnan(values(large)[0, 0]) and np.isnan(values(large)).sum() == 1 and large["nans"] == 1


def test_nothing_breaks_out():
    """Every text is inside the JSON, and there is no < in it at all."""
    class Model(nn.Module):
        def __init__(self):
            setattr(self, "</script><script>alert(1)//", nn.Linear(2, 2))

        def forward(self, x):
            return getattr(self, "</script><script>alert(1)//")(x)

    with mg.Tape() as tape:
        F.scaled_dot_product_attention(*[Model()(mg.ones((6, 2)))] * 3)
    text = page.render(tape, NASTY)
    assert "<" not in re.search(r'id="data">(.*?)</script>', text, re.S).group(1)
    text.encode("utf-8")
    assert data(text)["tokens"] == NASTY and "</script>" in data(text)["leaves"][0]["name"]


def test_attention_is_that_of_the_tape(tape):
    made = data(page.render(tape, "minigr"))
    assert made["tokens"] == list("minigr") and len(made["attentions"]) == 2
    for shown, r in zip(made["attentions"], [r for r in tape.records if r.attention]):
        weights = np.frombuffer(base64.b64decode(shown["weights"]), "<u2").reshape(r.attention.weights.shape) / 1e4
        assert abs(weights - r.attention.weights).max() < 0.51e-4
        bits = np.unpackbits(np.frombuffer(base64.b64decode(shown["visible"]), np.uint8), bitorder="little")
        assert (bits[:weights.size].reshape(weights.shape) == r.attention.visible).all()


def test_a_fused_op_opens_into_its_reference(tape):
    """The lines of A.10 for attention, and within them those of its softmax."""
    made = data(page.render(tape))
    node = next(node for node in made["nodes"] if node["op"] == "attention_fused")
    listed = made["compositions"][node["composition"]]
    assert [(n["op"], n["from"]) for n in listed["nodes"]] == [
        ("transpose", ["k"]), ("matmul", ["q", "0 transpose"]), ("multiply", ["1 matmul", f"{1 / np.sqrt(8)}"]),
        ("masked_softmax", ["2 multiply", "(6, 6) bool"]), ("matmul", ["3 masked_softmax", "v"])]
    assert listed["whole"] and listed["nodes"][1]["shape"] == "(2, 2, 6, 6)"
    inner = made["compositions"][listed["nodes"][3]["composition"]]
    assert "exp" in [n["op"] for n in inner["nodes"]]
    for node in made["nodes"]:                           # none is missing, none is there that is not fused
        assert (node["composition"] is not None) == (mg.primitives[node["op"]].reference is not None)


@pytest.mark.parametrize("kwargs", [
    {},
    {"n_kv_heads": 1, "position": "rope", "norm": "rms", "mlp": "swiglu", "bias": False, "sinks": True, "window": 2},
    {"d_model": 128, "context": 300, "vocab_size": 500, "n_heads": 2, "dropout": 0.1}])
def test_references_run_again_without_a_trace(kwargs):
    """On the recorded shapes or, where they are large, on small ones; neither the random stream nor an open tape nor
    composed mode sees it."""
    with kernels():
        model = nn.Transformer(**dict(vocab_size=11, context=8, d_model=16, n_layers=1, n_heads=2) | kwargs)
        t = model.config.context - 1
        ids = np.arange(2 * t).reshape(2, t) % model.config.vocab_size
        with mg.Tape() as tape:
            model.loss(ids, ids)
    before = get_rng_state()
    with mg.Tape() as other, mg.composed(), mg.no_grad():
        made = data(page.render(tape))
    assert get_rng_state() == before and not len(other)
    for node in made["nodes"]:
        assert (node["composition"] is not None) == (mg.primitives[node["op"]].reference is not None), node["op"]
    assert all(listed["whole"] for listed in made["compositions"]) == (t < 100)


def test_structure_only():
    """Without values the page still has graph, formulas, rules and memory."""
    x = mg.tensor([1.0, 2.0], requires_grad=True)
    with mg.Tape(values=False) as tape:
        F.exp(x).sum().backward()
    made = data(page.render(tape))
    assert not made["values"] and not made["snapshots"] and made["nodes"][0]["value"] is None
    assert [step[2] for step in made["steps"]] == [8, 8, 8, 0]


def test_refusals(tape, tmp_path):
    old = tmp_path / "old.html"
    old.write_text("old")
    with pytest.raises(ValueError, match=r"^\[Tape.html\] something must be recorded"):
        mg.Tape().html(old)
    with pytest.raises(ValueError, match=r"^\[Tape.html\] tokens must label .* there are 6: got 5 tokens$"):
        tape.html(old, tokens="abcde")
    with pytest.raises(TypeError, match=r"^\[Tape.html\] tokens are labels, one for each position: got 6$"):
        tape.html(old, tokens=6)
    with pytest.raises(FileNotFoundError, match="the folder must exist"):
        tape.html(tmp_path / "none" / "tape.html")
    with pytest.raises(IsADirectoryError):
        tape.html(tmp_path)
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["old.html"]
    x = mg.tensor([1.0], requires_grad=True)
    with mg.Tape() as plain:
        x * x
    with pytest.raises(ValueError, match="of which there are none: got 1 tokens"):
        plain.html(old, tokens=["a"])


def test_the_parts_are_in_the_package():
    """They are found as data of the package, not by a path beside the source."""
    for name in ("template.html", "page.css", "arrays.js", "graph.js", "page.js"):
        assert resources.files("minigrad.study.page").joinpath(name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chromium():
    part = "the page of a tape in a browser"
    api = or_skip("playwright.sync_api", part)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if "chromium" in os.environ.get("MINIGRAD_EXPECT", "").split():
            pytest.fail(f"chromium is not installed, and MINIGRAD_EXPECT names it: not checked: {part}")
        pytest.skip(f"chromium is not installed: not checked: {part}")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                 "--disable-background-networking", "--disable-component-update"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(tape, tokens, width=..., ...) is the page in a window; at the end nothing has gone wrong in any."""
    wrong, windows = [], []

    def open_page(tape, tokens=None, width=1280, height=860, **looks):
        path = tmp_path / f"tape{len(windows)}.html"
        tape.html(path, tokens)
        window = chromium.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce", **looks)
        window.on("console", lambda said: wrong.append(said.text))
        window.on("pageerror", lambda error: wrong.append(str(error)))
        window.on("dialog", lambda dialog: wrong.append("a dialog"))
        window.on("request", lambda asked: asked.url.startswith("file:") or wrong.append(asked.url))
        window.goto(path.as_uri())
        windows.append(window)
        return window

    yield open_page
    for window in windows:
        window.close()
    assert not wrong


def number(said):
    """What the page writes, as a float."""
    return float(said.replace("−", "-").replace("∞", "inf").replace(",", "").replace("\xa0", ""))


READ = """() => [...document.querySelectorAll('#panel figure')].map(f => ({
    stats: Object.fromEntries([...f.querySelectorAll('[data-stat]')].map(e => [e.dataset.stat, e.textContent])),
    values: [...f.querySelectorAll('td, .single')].map(e => e.textContent),
    label: f.querySelector('canvas')?.getAttribute('aria-label') ?? ''}))"""

STEP = f"""[...['#panel', '#panel h2', '#panel .formula'].map(at => document.querySelector(at).innerText), ({READ})(),
    $('slider').getAttribute('aria-valuetext'), $('live').textContent]"""


def test_steps_to_the_end_and_shows_the_tape(tape, opened):
    """Every step by key: the node, its formula and line, and every number of four digits is the tape's."""
    window = opened(tape)
    order = [(r, None) for r in tape.records] + [(tape.records[p.number], p) for p in tape.pulls]
    for i, (r, p) in enumerate(order):
        if i:
            window.keyboard.press("ArrowRight")
        panel, title, formula, shown, said, live = window.evaluate(STEP)
        assert f"step {i + 1} of {len(order)}" in panel and r.line in panel
        assert title.split() == [str(r.number), r.name] and formula.strip()
        assert f"{r.number} {r.name}" in said and (said == live or not i)
        due = [r.value] if p is None else [p.ct, *(out.ct for out in p.results), r.value]
        assert len(shown) == len(due)
        for got, s in zip(shown, due):
            for name, said in got["stats"].items():
                assert number(said) == pytest.approx(getattr(s, name), rel=5.1e-4)
            if s.whole:
                assert [number(v) for v in got["values"]] == pytest.approx(s.values.reshape(-1), rel=5.1e-4)
            else:
                assert len(got["stats"]) == 4 and got["stats"]["norm"] in got["label"]
    window.keyboard.press("ArrowRight")                  # beyond the end nothing happens
    assert f"step {len(order)} of" in window.inner_text("#panel")
    window.keyboard.press("Home")
    assert window.input_value("#slider") == "0"


def test_modules_open_and_close_by_key(tape, opened):
    window = opened(tape)
    state = "document.querySelector('[aria-label^=\"module blocks.1,\"]').getAttribute('aria-expanded')"
    assert window.evaluate(state) == "false"
    window.focus("#sheet [role=treeitem][tabindex='0']")
    while "blocks.1," not in (window.evaluate("document.activeElement.getAttribute('aria-label')") or ""):
        window.keyboard.press("ArrowDown")
    window.keyboard.press("Enter")
    assert window.evaluate(state) == "true"
    assert window.locator("[aria-label*='norm1 layer_norm']").count() == 1
    window.keyboard.press("Enter")                       # focus has stayed on it
    assert window.evaluate(state) == "false"
    window.click("#unfold")
    assert window.locator("#sheet .node").count() == len(tape.records)


def test_finding_by_name(tape, opened):
    window = opened(tape)
    for name, expected in (("cross_ent", "cross_entropy"), ("1.attention.qkv.weight", "blocks.1.attention.qkv.weight")):
        window.keyboard.press("/")
        window.keyboard.type(name)
        window.keyboard.press("Enter")
        assert expected in window.inner_text("#panel h2") and window.input_value("#search") == ""
    leaf = next(leaf for leaf in tape.leaves if leaf.name == "blocks.1.attention.qkv.weight")
    value, gradient = window.evaluate(READ)
    assert number(value["stats"]["norm"]) == pytest.approx(leaf.value.norm, rel=5.1e-4)
    assert number(gradient["stats"]["norm"]) == pytest.approx(leaf.gradient.norm, rel=5.1e-4)
    window.click("text=25 linear")                       # the node that uses it
    assert "blocks.1.attention.qkv" in window.inner_text("#panel .from")


def test_attention_and_composition(tape, opened):
    """A in numbers with the labels of the tokens, hidden keys hidden; text is text; a fused op opens twice."""
    window = opened(tape, NASTY)
    r = next(r for r in tape.records if r.attention)
    window.evaluate(f"show({r.number})")
    window.click("text=All weights as numbers")
    window.wait_for_selector(".attention table td")      # what a click opens is filled in by an event of its own
    cells = window.locator(".attention table td").all_inner_texts()
    due = [f"{w:.4f}" if seen else "hidden" for w, seen in zip(r.attention.weights.flat, r.attention.visible.flat)]
    assert cells == due and "hidden" in due
    assert window.locator(".attention svg text").all_text_contents()[:5] == NASTY[:5]
    assert window.locator("script").count() == 2 and window.locator(".attention b").count() == 0
    window.click("text=open its reference, 5 plain nodes")
    window.click("text=masked_softmax is fused")
    window.wait_for_selector(".listing .listing li")
    assert window.locator(".listing .listing li").count() >= 4
    window.keyboard.press("b")
    assert window.inner_text("#panel .pass") == "backward"
    assert window.locator("#panel .formula").first.inner_text().count("=") == 5      # no bias and no sinks were given


CONTRAST = """selector => {
    const light = text => text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
    const text = document.querySelector(selector);
    let under = text;
    while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
    const ratio = light(getComputedStyle(text).color) / light(getComputedStyle(under).backgroundColor);
    return Math.max(ratio, 1 / ratio)}"""


def test_fits_and_reads_on_desk_and_phone_in_light_and_dark(tape, opened):
    """Nothing sticks out sideways at any kind of step; text has the contrast that WCAG AA asks for, 4.5 to 1."""
    window = opened(tape)
    attention = next(r.number for r in tape.records if r.attention)
    for scheme in ("light", "dark"):
        window.emulate_media(color_scheme=scheme)
        for width in (1280, 400):
            window.set_viewport_size({"width": width, "height": 860})
            for step in (0, attention, len(tape.records), len(tape.records) + len(tape.pulls) - 1):
                window.evaluate(f"show({step})")
                assert window.evaluate("document.documentElement.scrollWidth") <= width
                assert window.evaluate("$('panel').scrollWidth - $('panel').clientWidth") <= 0
                for selector in (".pass", "#panel h2", ".from", "#panel h3", ".formula", "#legend b", ".tools label"):
                    assert window.evaluate(CONTRAST, selector) >= 4.5, (scheme, width, step, selector)


def test_a_long_tape_without_modules_or_values(opened):
    """Three hundred nodes, two passes, structure only: still a page that steps."""
    x = mg.tensor(np.ones(3), requires_grad=True)
    with mg.Tape(values=False) as tape:
        y = x
        for _ in range(100):
            y = F.tanh(y) + y * 0.5
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    window = opened(tape)
    window.keyboard.press("End")
    assert "step 904 of" in window.inner_text("#panel")
    assert "No values" in window.inner_text("#panel") and "backward 1" in window.inner_text("#panel")
