"""A run's page in a real browser: its charts are drawn, it asks for nothing, and it can be read wherever it is shown."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from pipelines.config import BatchConfig
from pipelines.summary import finish
from tests.unit.story import answer, echo

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH")

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
CHARTS = [
    "Output tokens per second", "Running requests", "Finished rows per second", "Each worker's time", "Prompt length",
    "Answer length", "Time to first token, waiting included", "Time per output token",
    "End to end, from the engine's door to the last token", "What the same tokens would have cost at", "Why answers ended",
]  # fmt: skip
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of usual size

# For each chart its title, the size of its largest mark on the screen, and how many marks are there.
MARKS = """
return [...document.querySelectorAll("figure")].map(figure => {
  const marks = [...figure.querySelectorAll("svg .role-mark path, svg .role-mark line")];
  const drawn = marks.map(mark => mark.getBoundingClientRect()).filter(box => box.width * box.height > 0);
  return [figure.querySelector("h3").textContent, Math.max(0, ...drawn.map(box => box.width * box.height)), drawn.length];
});
"""
# Each text that is shown, its colour, and what it stands on: in a chart the topmost mark beneath it, else the page.
COLOURS = """
document.querySelectorAll("details").forEach(one => one.open = true);
const style = document.createElement("style");
style.textContent = "svg * { pointer-events: visiblePainted !important }";
document.head.append(style);
function solid(colour) { const parts = colour.match(/[\\d.]+/g); return parts && (parts.length < 4 || +parts[3] === 1); }
function background(element) {
  for (let one = element; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (solid(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
}
function beneath(text) {
  text.scrollIntoView({block: "center"});
  const box = text.getBoundingClientRect();
  for (const one of document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2)) {
    if (one instanceof SVGGeometryElement && one.closest(".role-mark")) {
      const drawn = getComputedStyle(one);
      if (solid(drawn.fill) && +drawn.fillOpacity === 1) return drawn.fill;
    }
  }
  return background(text);
}
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const nodes = [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE);
  const own = nodes.map(node => node.textContent.trim()).join("");
  if (!own || !element.getClientRects().length) continue;
  const isDrawn = element instanceof SVGElement;
  const colour = isDrawn ? getComputedStyle(element).fill : getComputedStyle(element).color;
  found.push([own.slice(0, 40), colour, isDrawn ? beneath(element) : background(element)]);
}
return found;
"""
WIDE = """
const width = document.documentElement.clientWidth;
const scrolls = element => element.closest(".scroll") !== null;
return [document.documentElement.scrollWidth - width, [...document.querySelectorAll("body *")]
  .filter(one => !scrolls(one) && !(one instanceof SVGElement) && one.getBoundingClientRect().right > width + 0.5)
  .map(one => one.outerHTML.slice(0, 80))];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Chrome(options=options, service=Service(DRIVER)) as chrome:
        yield chrome


@pytest.fixture
def page(browser: Chrome, batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path) -> Chrome:
    """The page of a run with failures of two kinds, cut answers, two attempts, and ids that are wider than a phone."""
    rows = [{"id": f"row-{i}" + "-long" * (30 if i % 50 == 0 else 0), "prompt": prompt_of(i)} for i in range(300)]
    config = batch_config(
        *echo(jsonl(rows), str(tmp_path / "run"), "engine.seconds_per_token=0.002", "engine.refuse_text=refused"),
        "sampling.max_tokens=30",
    )
    answer(config, most_shards=8)
    run, plan, _ = answer(config)
    finish(run, plan, config)
    browser.get("about:blank")
    browser.get_log("performance")  # takes away what the browser's own first page asked for
    browser.get((tmp_path / "run" / "report.html").as_uri())
    return browser


def prompt_of(number: int) -> str | None:
    if number % 40 == 3:
        return None
    return "refused" if number % 40 == 9 else "word " * (number % 37 + 1)


def test_every_chart_is_drawn_and_the_page_asks_for_nothing(page: Chrome) -> None:
    marks = {title: (area, count) for title, area, count in page.execute_script(MARKS)}
    assert list(marks) == CHARTS
    assert not [title for title, (area, count) in marks.items() if area < 50 or count < 1], marks

    assert page.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    requested = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url for url in requested if url != "data:,"} == {page.current_url}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_it_stands_on(page: Chrome, scheme: str) -> None:
    emulate(page, scheme)
    colours = page.execute_script(COLOURS)
    assert len(colours) > 200
    is_dark = luminance(page.execute_script("return getComputedStyle(document.body).backgroundColor")) < 0.5
    assert is_dark == (scheme == "dark")
    faint = [(text, ink, ground) for text, ink, ground in colours if contrast(ink, ground) < LEAST_CONTRAST]
    assert not faint


def test_on_paper_it_is_light_whatever_the_screen_is(page: Chrome) -> None:
    emulate(page, "dark", media="print")
    assert luminance(page.execute_script("return getComputedStyle(document.body).backgroundColor")) == 1
    assert not [(text, ink) for text, ink, ground in page.execute_script(COLOURS) if contrast(ink, ground) < LEAST_CONTRAST]


def test_nothing_is_wider_than_a_phone(page: Chrome) -> None:
    emulate(page, "light")
    phone = {"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        assert page.execute_script(WIDE) == [0, []]
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def emulate(page: Chrome, scheme: str, media: str = "screen") -> None:
    settings: dict[str, Any] = {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", settings)


def contrast(one: str, other: str) -> float:
    """As WCAG defines it: 1 for the same colour, 21 for black on white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
