"""The report's page in a browser: nothing goes wrong, tables sort, figures show, and a phone shows all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from isentrope.report.html import page
from tests.fixtures.study import study

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.figures,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser, google-chrome or chrome found"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--virtual-time-budget=4000",
)  # fmt: skip
# before the page's own script: what goes wrong is kept
WATCH = """<script>
const told = { errors: [] };
addEventListener("error", (event) => told.errors.push(String(event.message || event.target.outerHTML)), true);
addEventListener("unhandledrejection", (event) => told.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => told.errors.push(event.violatedDirective + event.blockedURI));
for (const kind of ["error", "warn"]) console[kind] = (...words) => told.errors.push(words.join(" "));
</script>"""
# after it: press, look, and leave the answer in the document
TELL = """<script>
addEventListener("load", () => {
  try { %s } catch (error) { told.errors.push(String(error)); }
  const answer = document.createElement("script");
  answer.type = "application/json";
  answer.id = "answer";
  answer.textContent = JSON.stringify(told).replaceAll("<", "\\\\u003c");
  document.body.append(answer);
});
</script>"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(page.write_report(study(tmp_path_factory.mktemp("study")))["report"])


def opened(path: Path, script: str, width: int = 1280, around: str | None = None) -> dict[str, Any]:
    """What `script` put into `told`, run in the page or, given HTML around it, in a page that frames it."""
    text = path.read_text(encoding="utf-8")
    probe = path.with_name("probe.html")
    asked = TELL % script
    if around is None:
        text = text.replace("<body>", f"<body>{WATCH}").replace("</body>", f"{asked}</body>")
    else:
        text = f"<!doctype html><body>{WATCH}{around}{asked}</body>"
    probe.write_text(text, encoding="utf-8")
    profile = path.with_name("profile")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom"]
    if around is not None:
        command.append("--allow-file-access-from-files")  # to look into the frame
    settings = os.environ | {"HOME": str(path.parent)}
    done = subprocess.run(
        [*command, probe.as_uri()], capture_output=True, text=True, timeout=600, check=False, env=settings
    )
    shutil.rmtree(profile, ignore_errors=True)
    actual = re.search(r'<script type="application/json" id="answer">(.*?)</script>', done.stdout, re.DOTALL)
    assert actual, f"no answer from {BROWSER} ({done.returncode}): {done.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(unescape(actual[1]))
    return answer


SORTING = """
const sheet = document.querySelectorAll(".sheet")[1];
const heads = [...sheet.querySelectorAll("thead tr:last-child th")];
const column = (i) => [...sheet.querySelectorAll("tbody tr")].map((row) => row.cells[i].dataset.v ?? null);
const press = (i) => { const b = heads[i].querySelector("button"); b.focus(); b.click(); };
const takes = (button) => { button.focus(); return document.activeElement === button; };
told.focusable = heads.every((head) => takes(head.querySelector("button")));
told.count = heads.length;
told.original = column(0);
told.ppl = []; told.acc = []; told.names = []; told.sorts = [];
for (let i = 0; i < 3; i++) { press(6); told.ppl.push(column(6)); told.sorts.push(heads.map((h) => h.ariaSort)); }
told.restored = column(0);
press(6); press(12); told.acc.push(column(12)); told.sorts.push(heads.map((h) => h.ariaSort));
press(0); told.names.push(column(0));
const seen = (kind) => [...sheet.querySelectorAll("tbody ." + kind)].filter((cell) => cell.offsetWidth > 0).length;
told.shown = {};
for (const radio of sheet.querySelectorAll("input[type=radio]")) {
  radio.click();
  told.shown[radio.value] = [seen("m-ppl"), seen("m-acc")];
}
told.intervals = [seen("m-acc .interval")];
sheet.querySelector("[data-intervals]").click();
told.intervals.push(seen("m-acc .interval"));
"""


def test_tables_sort_and_columns_hide(written: Path) -> None:
    told = opened(written, SORTING)
    assert told["errors"] == []
    assert told["focusable"] and told["count"] == 13
    up, down, restored = told["ppl"]
    measured = [float(value) for value in up if value is not None]
    assert measured == sorted(measured) and up[len(measured) :] == [None, None]  # gaps last, whichever the order
    assert [float(value) for value in down if value is not None] == sorted(measured, reverse=True)
    assert down[-2:] == [None, None] and restored != up and told["restored"] == told["original"]
    states = [(state[6], {*state[:6], *state[7:]}) for state in told["sorts"][:3]]
    assert states == [("ascending", {"none"}), ("descending", {"none"}), ("none", {"none"})]
    best_first = [float(value) for value in told["acc"][0] if value is not None]
    assert best_first == sorted(best_first, reverse=True) and told["sorts"][3][12] == "descending"
    assert told["sorts"][3][6] == "none" and told["names"][0][0] == "ALiBi"
    assert told["shown"] == {"ppl": [216, 0], "acc": [0, 216], "both": [216, 216]}
    assert told["intervals"] == [0, 213]


LOOKING = """
told.images = [...document.images].map((i) => [i.complete, i.naturalWidth, i.getBoundingClientRect().width, i.alt]);
told.chart = document.querySelector(".chart").getBoundingClientRect().width;
told.curves = document.querySelectorAll(".chart")[0].querySelectorAll("polyline").length;
told.wide = [document.documentElement.scrollWidth, innerWidth];
told.requests = performance.getEntriesByType("resource").map((e) => e.name).filter((n) => !n.startsWith("data:"));
told.targets = [...document.querySelectorAll("nav a")].map((a) => Boolean(document.querySelector(a.hash)));
"""


def test_figures_are_visible_and_nothing_is_fetched(written: Path) -> None:
    told = opened(written, LOOKING)
    assert told["errors"] == [] and told["requests"] == []
    assert len(told["images"]) == 4
    assert all(complete and natural > 0 and shown > 100 and alt for complete, natural, shown, alt in told["images"])
    assert told["chart"] > 300 and told["curves"] == 2
    assert told["wide"][0] <= told["wide"][1]
    assert told["targets"] == [True] * 3


NARROW = """
const inside = document.querySelector("iframe").contentWindow;
const page = inside.document;
for (const fold of page.querySelectorAll("details")) fold.open = true;
told.width = inside.innerWidth;
told.scroll = page.documentElement.scrollWidth;
told.shown = page.querySelector(".sheet").dataset.show;
for (const both of page.querySelectorAll("input[value=both]")) both.click();
told.both = page.documentElement.scrollWidth;
const scroll = page.querySelectorAll(".sheet .scroll")[1];
told.table = [scroll.scrollWidth, scroll.clientWidth];
const outside = (e) => !e.closest(".scroll") && e.getBoundingClientRect().right > inside.innerWidth + 0.5;
const box = page.querySelector("figure .scroll");
box.click();
told.enlarged = [box.scrollWidth > box.clientWidth, page.documentElement.scrollWidth];
told.outside = [...page.body.querySelectorAll("*")].filter(outside).map((e) => e.tagName);
"""


def test_a_phone_shows_the_page_without_scrolling_sideways(written: Path) -> None:
    # a browser's own window is wider than a phone, a frame need not be
    frame = '<iframe src="report.html" style="width:375px;height:800px;border:0"></iframe>'
    told = opened(written, NARROW, around=frame)
    assert told["errors"] == []
    assert told["width"] == 375 and told["scroll"] <= 375 and told["both"] <= 375 and told["outside"] == []
    assert told["shown"] == "acc"
    assert told["enlarged"][0] and told["enlarged"][1] <= 375
    assert told["table"][0] > told["table"][1]  # the table scrolls in its own box
