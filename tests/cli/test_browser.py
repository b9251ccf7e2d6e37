"""Pages in a real browser: both themes, a wide and a narrow window, and paper.

Without Chromium they are skipped, but where PARPLAN_NEEDS_BROWSER is set, as in CI, they fail.
Pictures are kept in the tests' temporary folder, for people to look at.
"""

from __future__ import annotations

import base64
import os
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = 1280, 390
PATIENCE_S = 120
DRAWN = """
const figures = [...document.querySelectorAll("[data-figure]")];
return figures.length > 0 && figures.every((each) => each.dataset.drawn === "yes");
"""
SHAPES = """
return [...document.querySelectorAll("[data-figure]")].map((each) => [
  each.dataset.figure,
  each.querySelectorAll(".cartesianlayer .trace path").length,
  each.clientHeight - each.querySelector(".main-svg").clientHeight,
]);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium with a fresh profile."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("PARPLAN_NEEDS_BROWSER"):
            pytest.fail("chromium and chromedriver are needed here")
        pytest.skip("there is no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    own = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    own.execute_cdp_cmd("Network.enable", {})
    own.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    yield own
    own.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each command, by name."""
    from click.testing import CliRunner  # noqa: PLC0415

    from cli import main  # noqa: PLC0415 - after the path is set

    folder = tmp_path_factory.mktemp("pages")
    job = ["--model", "gpt2", "--cluster", "4xh100-80g", "--global-batch", "16", "--seq-len", "512"]
    one, other = str(folder / "one.yaml"), str(folder / "other.yaml")
    commands = {
        "plan": ["plan", *job, "--fix", "pp=2", "-o", one],
        "energy": ["plan", *job, "--objective", "energy", "-o", other],
        "estimate": ["estimate", *job, "--pp", "4", "--schedule", "zb-h1"],
        "compare": ["compare", one, other],
    }
    for name, command in commands.items():
        done = CliRunner().invoke(main, [*command, "--html", str(folder / f"{name}.html")])
        assert done.exit_code == 0, done.stderr
    return folder


def opened(browser, path, *, theme, width, media="screen"):
    """Open a page and wait until every figure is drawn."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": media, "features": [{"name": "prefers-color-scheme", "value": theme}]},
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    WebDriverWait(browser, PATIENCE_S).until(lambda own: own.execute_script(DRAWN))


def colour(browser, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return browser.execute_script(script, selector, name)


def keep_picture(browser, path):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return window.innerWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    taken = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    path.write_bytes(base64.b64decode(taken["data"]))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "energy", "estimate", "compare"])
def test_every_figure_is_drawn_without_an_error(browser, pages, name, theme, width):
    opened(browser, pages / f"{name}.html", theme=theme, width=width)
    assert browser.get_log("browser") == []
    shapes = browser.execute_script(SHAPES)
    assert shapes
    for figure, drawn, unused in shapes:
        assert drawn > 0, figure
        assert abs(unused) <= 8, figure
    over = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(over) == 0
    keep_picture(browser, pages / f"{name}-{theme}-{width}.png")


@pytest.mark.parametrize(
    ("theme", "text"), [("light", "rgb(27, 31, 36)"), ("dark", "rgb(230, 234, 239)")]
)
def test_figures_have_the_colours_of_the_page(browser, pages, theme, text):
    opened(browser, pages / "plan.html", theme=theme, width=WIDE)
    assert colour(browser, "body", "color") == text
    assert colour(browser, "#figure-memory .xtick text", "fill") == text


def test_figures_follow_when_the_theme_changes(browser, pages):
    opened(browser, pages / "plan.html", theme="light", width=WIDE)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    WebDriverWait(browser, PATIENCE_S).until(
        lambda own: colour(own, "#figure-memory .xtick text", "fill") == "rgb(230, 234, 239)"
    )


def test_dragging_zooms_the_timeline_and_a_double_click_resets_it(browser, pages):
    opened(browser, pages / "plan.html", theme="light", width=WIDE)
    script = """
    const figure = document.getElementById("figure-timeline");
    const done = arguments[arguments.length - 1];
    const whole = figure._fullLayout.xaxis.range[1];
    Plotly.relayout(figure, {"xaxis.range": [0, whole / 4]}).then(() =>
      done([figure._fullLayout.dragmode, whole, figure._fullLayout.xaxis.range[1]]));
    """
    dragmode, whole, zoomed = browser.execute_async_script(script)
    assert dragmode == "zoom"
    assert zoomed == pytest.approx(whole / 4)


def test_the_figures_show_the_numbers_that_the_page_carries(browser, pages):
    opened(browser, pages / "plan.html", theme="light", width=WIDE)
    step, heights = browser.execute_script("""
    const answer = JSON.parse(document.getElementById("answer").textContent);
    const figure = document.getElementById("figure-time");
    return [answer.step_s, figure.calcdata.map((trace) => trace[0].s1)];
    """)
    assert max(heights) == pytest.approx(step)


def test_it_prints_in_dark_ink_on_white_whatever_the_theme(browser, pages):
    opened(browser, pages / "plan.html", theme="dark", width=740, media="print")
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    WebDriverWait(browser, PATIENCE_S).until(
        lambda own: colour(own, "#figure-memory .xtick text", "fill") == "rgb(0, 0, 0)"
    )
    assert colour(browser, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert colour(browser, "nav", "display") == "none"
    keep_picture(browser, pages / "plan-print.png")
