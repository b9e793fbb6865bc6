"""The HTML report: self-contained, escaped, readable on a phone, in print and in the dark. Judged by Chromium where it is installed."""

from __future__ import annotations

import base64
import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from model.report import coverage_rows, render_report
from model.report_plots import NARROW, WIDE, Scale, by_layer, layer_plots, tensor_plots
from tests.conftest import TinyFolder
from tests.converter.command_line import ms_convert
from tests.model.test_wrong_tables import MISTAKES
from tests.model.verifying import SCHEMA, convert, table_text, verify, write_table

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
HOSTILE = "<script>document.title='owned'</script>\"'><img src=http://example.invalid/x onerror=alert(1)>{{ 7*7 }}&amp;"
LONG = "x" * 300


@pytest.fixture(scope="module")
def facts(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What holds: a small llama with text, a continuation and padding."""
    source = tiny_folder("llama-uneven-vocab", tokenizer=True)
    return verify(source, convert(source, tmp_path_factory.mktemp("holds") / "slices", "--tp", 2, "--pp", 2), "--generate", 4)


@pytest.fixture(scope="module")
def failing(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What does not: weights, forward pass and continuation."""
    folder, mistake = tmp_path_factory.mktemp("fails"), MISTAKES["query and key exchanged in one layer"]
    table = write_table(folder, mistake.make(table_text(mistake.family)))
    slices = convert(tiny_folder(mistake.variant), folder / "slices", "--tp", 2, "--pp", 2, "--rules", table)
    return verify(tiny_folder(mistake.variant), slices, "--generate", 4)


@pytest.fixture(scope="module")
def hostile(failing: dict[str, Any]) -> dict[str, Any]:
    """Every text that a stranger's files can choose is an attack, or longer than any line."""
    found = copy.deepcopy(failing)
    found["source"] |= {"path": HOSTILE, "architecture": HOSTILE, "table": LONG, "dtypes": {HOSTILE: 1}}
    found["target"]["path"] = LONG
    found["notes"] = [HOSTILE, LONG]
    found["checks"][0]["summary"], found["checks"][1]["summary"] = HOSTILE, LONG
    for item in found["weights"]["differences"]:
        item.update(name=HOSTILE, file=LONG, what=HOSTILE)
    found["weights"]["fates"] += [{"name": LONG, "fate": "dropped", "parameters": [], "reason": HOSTILE}]
    found["dropped"] = [{"name": HOSTILE, "why": LONG}]
    found["padded"] = [{"name": LONG, "axis": "vocab", "from": 1, "to": 2}]
    found["forward"]["continuation"] |= {"prompt_text": HOSTILE, "reference_text": LONG, "ours_text": HOSTILE}
    found["command"] = f"ms-convert verify {HOSTILE} {LONG}"
    found["description_differences"] = [{"field": "rope", "source": {"theta": HOSTILE}, "target": LONG}]
    jsonschema.validate(found, SCHEMA)
    return found


class Links(HTMLParser):
    """Whatever a browser might fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [
            (name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "poster") or name.startswith("on")
        ]


def links_of(html: str) -> Links:
    parser = Links()
    parser.feed(html)
    return parser


def test_the_report_fetches_and_runs_nothing(facts: dict[str, Any], hostile: dict[str, Any]) -> None:
    for html in (render_report(facts), render_report(hostile)):
        found = links_of(html)
        assert found.found == [("href", "data:,")]
        assert not {"script", "img", "iframe", "object", "embed", "form"} & set(found.tags)
        style = html[html.index("<style>") : html.index("</style>")]
        assert "url(" not in style and "@import" not in style and "default-src 'none'" in html


def test_names_from_strangers_are_text(hostile: dict[str, Any]) -> None:
    html = render_report(hostile)
    assert HOSTILE not in html and "&lt;script&gt;document.title" in html and "{{ 7*7 }}" in html


def test_the_verdict_and_its_reasons_are_in_the_report(facts: dict[str, Any], failing: dict[str, Any]) -> None:
    good, bad = (re.sub(r"\s+", " ", render_report(item)) for item in (facts, failing))
    assert ">VERIFIED<" in good and "Every bit is equal, and both models compute the same" in good and "diverges first" not in good
    assert ">NOT VERIFIED<" in bad and "diverges first: layers.2" in bad and "layers.2.attention.q_proj.weight" in bad
    for item, html in ((facts, good), (failing, bad)):
        assert all(check["name"] in html for check in item["checks"])
        assert item["command"].replace("'", "&#39;") in html and item["versions"]["mindspore"] in html
    assert "padded" in good and "vocab 199 rows to 256" in good and "replicated 2 times" in good


def test_a_report_without_a_forward_pass_says_so(facts: dict[str, Any]) -> None:
    html = re.sub(r"\s+", " ", render_report(facts | {"forward": None}))
    assert "The models were not run" in html and "Error by layer" not in html


def test_the_command_writes_the_report(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("gpt2")
    ran = ms_convert("verify", source, convert(source, tmp_path / "slices"), "--report", tmp_path / "report.html")
    assert ran.code == 0 and str(tmp_path / "report.html") in ran.out
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_plot_puts_larger_errors_higher_and_what_is_infinite_at_the_top() -> None:
    scale = Scale.around([1e-7, 3e-5, 1e-4, float("inf")])
    heights = [scale.y(value) for value in (0.0, 1e-7, 3e-5, 1e-4, 5.0, float("inf"))]
    assert heights == sorted(heights, reverse=True) and heights[0] > heights[1] > heights[2] > heights[3] == heights[4] == heights[5]
    assert [tick.at for tick in scale.ticks()] == sorted(tick.at for tick in scale.ticks())


def test_the_plots_show_every_state_and_every_parameter(failing: dict[str, Any]) -> None:
    for plot, width in zip(layer_plots(failing["forward"]), (WIDE, NARROW), strict=True):
        assert [mark.bad for mark in plot.line] == [not state["holds"] for state in failing["forward"]["states"]]
        assert plot.first is not None and plot.first.x == plot.line[3].x
        assert all(0 < mark.x < width for mark in plot.line) and plot.x_ticks[-1].text == "logits"
    wide, narrow = tensor_plots(failing["weights"])
    assert (
        len(wide.bars) == len(failing["weights"]["holdings"])
        and sum(bar.bad for bar in wide.bars) == sum(bar.bad for bar in narrow.bars) == 2
    )


def test_ten_thousand_parameters_are_drawn_as_a_few_hundred_bars_and_no_error_is_lost(failing: dict[str, Any]) -> None:
    name = "layers.{}.mlp.up_proj.weight"
    holdings = [{"name": name.format(layer), "sources": [], "files": []} for layer in range(10_000)]
    wrong = failing["weights"]["differences"][0] | {"name": name.format(7_777), "max_relative_error": 0.5}
    for plot in tensor_plots({"holdings": holdings, "differences": [wrong]}):
        assert len(plot.bars) <= 400
        (bad,) = (bar for bar in plot.bars if bar.bad)
        assert name.format(7_777) in bad.label and "5.00e-01" in bad.label


def test_parameters_stand_layer_by_layer() -> None:
    names = [
        "embedding.tokens",
        "layers.0.a",
        "layers.1.a",
        "layers.10.a",
        "layers.0.b",
        "layers.1.b",
        "layers.10.b",
        "final_norm",
        "lm_head",
    ]
    assert by_layer(names) == [
        "embedding.tokens", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.10.a", "layers.10.b", "final_norm", "lm_head",
    ]  # fmt: skip


def test_coverage_is_folded_over_layers(facts: dict[str, Any]) -> None:
    rows = {row["name"]: row["became"] for row in coverage_rows(facts["weights"]["fates"])}
    assert rows["model.layers.{0..3}.self_attn.q_proj.weight"] == "layers.{0..3}.attention.q_proj.weight"
    assert rows["lm_head.weight"] == "lm_head.weight" and len(rows) == 12


# --- in a browser -----------------------------------------------------------------------------------------------------------------------

MEASURE = """<script>
addEventListener("load", () => {
  const root = document.documentElement, seen = element => element.getClientRects().length > 0;
  const wide = [...document.querySelectorAll("body *")].filter(e => seen(e) && e.getBoundingClientRect().right > root.clientWidth + 0.5);
  const measured = {
    width: root.clientWidth, scroll: root.scrollWidth, wide: wide.map(e => e.tagName + "." + (e.getAttribute("class") || "")),
    resources: performance.getEntriesByType("resource").map(e => e.name), scripts: document.scripts.length, images: document.images.length,
    title: document.title, background: getComputedStyle(document.body).backgroundColor, color: getComputedStyle(document.body).color,
    plots: [...document.querySelectorAll("main svg[role]")].filter(seen).map(e => Math.round(e.getBoundingClientRect().width)),
    smallest: Math.min(...[...document.querySelectorAll("main svg[role] text")].filter(seen).map(e => e.getBoundingClientRect().height)),
  };
  parent.postMessage(JSON.stringify(measured), "*");
});
</script>"""
"""Put into a copy of the page, whose policy allows no script, to look at it from within."""
FRAME = """<!DOCTYPE html><meta charset="utf-8"><pre id="measured"></pre>
<iframe src="{page}" style="border: 0; width: {width}px; height: 900px"></iframe>
<script>addEventListener("message", event => {{ document.getElementById("measured").textContent = btoa(event.data); }});</script>"""
"""A window cannot be narrower than 500 pixels; a frame can."""


def browse(page: Path, profile: Path, *options: str) -> str:
    """Chromium's output for a page."""
    quiet = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
    )  # fmt: skip
    command = [str(CHROMIUM), *quiet, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(html: str, folder: Path, width: int, dark: bool = False) -> dict[str, Any]:
    """What MEASURE finds in a page that is `width` pixels wide."""
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', html)
    assert policy is not None
    page, frame = folder / f"report-{width}-{dark}.html", folder / f"frame-{width}-{dark}.html"
    page.write_text(html.replace(policy.group(), "").replace("</head>", MEASURE + "</head>"), encoding="utf-8")
    frame.write_text(FRAME.format(page=page.name, width=width), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ("--window-size=1400,1000", "--hide-scrollbars", scheme, "--virtual-time-budget=10000", "--dump-dom")
    dom = browse(frame, folder / f"profile-{width}-{dark}", *options)
    told = re.search(r'<pre id="measured">([^<]+)</pre>', dom)
    assert told is not None, dom
    found: dict[str, Any] = json.loads(base64.b64decode(told.group(1)))
    return found


@chromium
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("which", ["facts", "failing", "hostile"])
def test_nothing_overflows_and_nothing_is_fetched(which: str, width: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = measured(render_report(request.getfixturevalue(which)), tmp_path, width)
    assert (found["width"], found["scroll"], found["wide"]) == (width, width, [])
    assert found["resources"] == [] and found["images"] == 0 and found["scripts"] == 1
    assert "erified" in found["title"] and found["title"] != "owned"
    assert len(found["plots"]) == 2 and all(plot > 0.75 * min(width, 960) for plot in found["plots"])
    assert found["smallest"] > 11, "the labels of a plot must stay readable"


@chromium
def test_dark_and_light_are_what_the_reader_prefers(facts: dict[str, Any], tmp_path: Path) -> None:
    def brightness(color: str) -> int:
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    light, dark = (measured(render_report(facts), tmp_path, 1280, dark) for dark in (False, True))
    assert brightness(light["background"]) > 600 > 150 > brightness(light["color"])
    assert brightness(dark["background"]) < 150 < 600 < brightness(dark["color"])


@chromium
def test_it_prints(failing: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(failing), encoding="utf-8")
    browse(page, tmp_path / "profile", "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'report.pdf'}")
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "report.pdf").read_bytes()))
    assert 2 <= pages <= 8
