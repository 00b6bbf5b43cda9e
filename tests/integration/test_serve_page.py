"""The endpoint's page in a real browser: a prompt is tried with a key, its answer streams in, and its speed is shown."""

import re
import shutil
from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.integration.test_report_in_browser import SWITCHES
from tests.unit.serving import KEY, Endpoint, listening

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH")


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint("engine.seconds_per_token=0.2")


@pytest.fixture(scope="module")
def browser(endpoint: Endpoint) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for switch in SWITCHES:
        options.add_argument(switch)
    with listening(endpoint.app) as url, Chrome(options=options, service=Service(DRIVER)) as driver:
        driver.get(url)
        yield driver


def text_of(browser: Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def ask(browser: Chrome, prompt: str, key: str) -> None:
    for name, value in (("key", key), ("prompt", prompt)):
        field = browser.find_element(By.ID, name)
        field.clear()
        field.send_keys(value)
    browser.find_element(By.ID, "send").click()


def test_an_answer_streams_in_and_its_times_are_shown(browser: Chrome) -> None:
    ask(browser, "one two three four five six", KEY)
    seen = set()
    WebDriverWait(browser, 20, 0.05).until(lambda page: seen.add(text_of(page, "answer")) or "token" in text_of(page, "status"))
    assert text_of(browser, "answer") == "one two three four five six"
    assert len(seen) > 2, "the answer came in one piece"
    status = text_of(browser, "status")
    found = re.fullmatch(r"first token after ([\d.]+) s, ([\d.]+) tokens/s after it, 6 \+ 6 tokens", status)
    assert found, status
    assert float(found[1]) >= 0.2 and 2 < float(found[2]) < 6  # a token takes 0.2 s


def test_a_wrong_key_is_named_and_the_form_can_be_used_again(browser: Chrome) -> None:
    ask(browser, "one", "sk-wrong")
    WebDriverWait(browser, 20, 0.05).until(lambda page: text_of(page, "status").startswith("401: the API key"))
    assert browser.find_element(By.ID, "send").is_enabled()


def test_stopping_ends_the_generation(browser: Chrome, endpoint: Endpoint) -> None:
    ask(browser, "word " * 100, KEY)
    WebDriverWait(browser, 20, 0.05).until(lambda page: "word word" in text_of(page, "answer"))
    browser.find_element(By.ID, "stop").click()
    WebDriverWait(browser, 20, 0.05).until(lambda page: text_of(page, "status") == "stopped")
    WebDriverWait(browser, 20, 0.05).until(lambda _: endpoint.backend.server.num_running == 0)
    assert endpoint.heard.tallies[-1].finish_reason == "left"


def test_the_browser_has_nothing_to_complain_about_but_the_refusal(browser: Chrome) -> None:
    assert not [entry["message"] for entry in browser.get_log("browser") if "401" not in entry["message"]]
