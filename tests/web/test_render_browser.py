"""The page of `bray render` in a real browser."""

import base64
import io
import re
import shutil
import sys
import time

import imageio.v2 as imageio
import pytest
from PIL import Image
from render_for_tests import make_project, save

from bray.web.render import Render
from bray.web.runs import Project
from bray.web.server import RenderServer

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

FUNCTIONS = ("render", "several", "fails", "hangs")
MODULE = "renders_of_the_browser_test"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = make_project(tmp_path, MODULE)
    (path / "first" / "episodes" / "game-1-0.0.episode").unlink()
    save(path / "first", 40)
    yield path
    sys.modules.pop(MODULE, None)


@pytest.fixture
def server(project):
    made = RenderServer(Project(project, "first"), {f: Render(f, MODULE, f) for f in FUNCTIONS}, limit=1.0)
    yield made
    made.close()


@pytest.fixture
def page(browser, server):
    """The page, loaded. An error in its own code fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    context.set_default_timeout(10_000)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" and "status of" not in m.text else None)
    page.goto(server.url)
    page.wait_for_selector("#stage img, #stage .hint")
    yield page
    context.close()
    assert not errors


def tick(page):
    return int(page.inner_text("#tick").split(" / ")[0])


def at(page, number):
    """Wait until a tick is chosen and its picture shown."""
    page.wait_for_function(
        "n => document.getElementById('tick').textContent.startsWith(n + ' / ')"
        " && document.getElementById('stage').dataset.tick === String(n)",
        arg=number,
    )


def pixel(page, x, y):
    """A pixel of the picture that is shown."""
    data = page.get_attribute("#stage img", "src").removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").getpixel((x, y))


def test_it_opens_with_the_newest_episode(page):
    assert page.inner_text("#tick") == "0 / 39"
    assert page.inner_text("#episodes [aria-current=true] .title") == "game-1"
    assert page.input_value("#trial") == "first"
    assert page.input_value("#renderer") == "render"
    assert page.eval_on_selector("#stage img", "i => [i.naturalWidth, i.naturalHeight]") == [12, 8]
    assert page.eval_on_selector("#stage img", "i => i.clientWidth") > 400  # small pictures are enlarged
    fields = page.inner_text("#fields")
    assert re.search(r"features\s+float32\[2, 3\]\s+0 … 5", fields)
    assert re.search(r"position\s+\[0, 0\]", fields)
    assert "[[0., 1., 2.]," in fields


def test_steps_slider_and_keys(page):
    for press, want in (
        (lambda: page.click("#next"), 1),
        (lambda: page.click("#next"), 2),
        (lambda: page.click("#back"), 1),
        (lambda: page.click("#last"), 39),
        (lambda: page.click("#next"), 39),
        (lambda: page.click("#first"), 0),
        (lambda: page.keyboard.press("ArrowLeft"), 0),
        (lambda: page.keyboard.press("ArrowRight"), 1),
        (lambda: page.keyboard.press("Shift+ArrowRight"), 11),
        (lambda: page.keyboard.press("Shift+ArrowLeft"), 1),
        (lambda: page.keyboard.press("End"), 39),
        (lambda: page.keyboard.press("Home"), 0),
        (lambda: page.fill("#slider", "17"), 17),
        (lambda: page.keyboard.press("ArrowRight"), 18),  # also with the slider in focus, once
    ):
        press()
        at(page, want)
    assert pixel(page, 6, 0) == (200, 180, 40)
    assert pixel(page, 7, 0) == (0, 0, 0)
    assert re.search(r"\btick\s+18\b", page.inner_text("#fields"))
    assert "tick=18" in page.url
    page.reload()
    at(page, 18)


def test_play_pause_speed_and_loop(page):
    page.keyboard.press("Space")
    page.wait_for_function("() => parseInt(document.getElementById('tick').textContent) > 2")
    assert page.get_attribute("#play", "aria-label") == "Pause"
    page.keyboard.press("Space")
    stopped = tick(page)
    assert 2 < stopped < 39
    page.wait_for_timeout(300)
    assert tick(page) == stopped
    assert page.get_attribute("#play", "aria-label") == "Play"
    at(page, stopped)
    assert re.search(rf"\btick\s+{stopped}\b", page.inner_text("#fields"))  # the State has caught up

    # slow is at most so fast; at that speed the second wait would take longer than waits may
    page.click("#first")
    page.select_option("#speed", "0.5")
    page.click("#play")
    started = time.monotonic()
    page.wait_for_timeout(400)
    assert tick(page) <= (time.monotonic() - started) * 0.5 + 1
    page.select_option("#speed", "30")
    page.wait_for_function("() => parseInt(document.getElementById('tick').textContent) > 15")
    page.click("#play")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#speed") == "60"
    page.keyboard.press("ArrowDown")
    assert page.input_value("#speed") == "30"

    page.select_option("#speed", "60")
    page.fill("#slider", "36")
    page.click("#play")
    page.wait_for_function("() => !document.body.classList.contains('is-playing')")  # it stops at the end
    assert tick(page) == 39
    page.check("#loop")
    page.click("#play")  # from the beginning
    page.fill("#slider", "37")
    page.click("#play")
    page.wait_for_function(
        "() => { const t = parseInt(document.getElementById('tick').textContent); return t > 2 && t < 30 }"
    )
    page.click("#play")


def test_renderers_and_their_errors(page, project):
    page.select_option("#renderer", "several")
    page.wait_for_selector("#stage figure:nth-child(3)")
    assert page.locator("#stage figcaption").all_inner_texts() == ["bars", "deep/0", "deep/1"]
    page.select_option("#renderer", "fails")
    page.wait_for_selector("#stage img")
    assert page.is_hidden("#problem")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#problem:visible")
    text = page.inner_text("#problem")
    assert "fails failed at tick 1" in text
    assert "ValueError: nothing to see at 1" in text
    assert f'{MODULE}.py", line' in text
    assert re.search(r"position\s+\[1, 2\]", page.inner_text("#fields"))  # the State is shown all the same
    page.select_option("#speed", "60")
    page.keyboard.press("Space")  # and the page goes on, through errors and pictures
    page.wait_for_function("() => parseInt(document.getElementById('tick').textContent) > 8")
    page.keyboard.press("Space")
    page.keyboard.press("Home")
    at(page, 0)
    assert page.is_hidden("#problem")

    page.select_option("#renderer", "hangs")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#problem:has-text('has not returned after 1 s')")
    page.keyboard.press("ArrowRight")
    at(page, 2)
    page.select_option("#renderer", "")
    page.wait_for_selector("#stage .hint:has-text('State only')")
    assert page.is_disabled("#export")

    # mended while the page is open
    file = project.parent / f"{MODULE}.py"
    file.write_text(file.read_text().replace('raise ValueError(f"nothing to see at {tick}")', "return np.ones((5, 5))"))
    page.select_option("#renderer", "fails")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    at(page, 1)
    assert page.is_hidden("#problem")


def test_episodes_come_while_a_training_runs_and_damaged_ones_are_named(page, project):
    assert page.locator("#episodes button").count() == 1
    save(project / "first", 7, "later-game", actor=2)
    page.wait_for_selector("#episodes button.new:has-text('later-game')")  # by itself
    broken = save(project / "first", 5, "torn-game", actor=3)
    broken.write_bytes(broken.read_bytes()[:-9])
    page.click("#refresh")
    page.click("#episodes button:has-text('torn-game')")
    page.wait_for_selector("#problem:has-text('torn-game-3.0.episode')")
    assert "damaged" in page.inner_text("#problem")
    page.wait_for_selector("#episodes button.bad:has-text('torn-game')")
    assert page.is_disabled("#play")
    page.click("#episodes button:has-text('later-game')")
    at(page, 0)
    assert page.inner_text("#tick") == "0 / 6"
    assert page.is_hidden("#problem")
    page.fill("#find", "torn")
    page.wait_for_function("() => document.querySelectorAll('#episodes button').length === 1")
    page.fill("#find", "")
    page.wait_for_function("() => document.querySelectorAll('#episodes button').length === 3")

    save(project / "second", 4, "other-trial")
    page.wait_for_selector("#trial option[value=second]", state="attached")
    page.select_option("#trial", "second")
    page.wait_for_function("() => document.getElementById('tick').textContent === '0 / 3'")
    assert page.locator("#episodes .title").all_inner_texts() == ["other-trial"]


@pytest.mark.parametrize("form", ["mp4", "gif"])
def test_export(page, project, form):
    page.select_option("#speed", "20")
    page.click("#export")
    assert page.input_value("#export-fps") == "20"
    page.select_option("#export-format", form)
    page.fill("#export-first", "5")
    page.fill("#export-last", "16")
    page.click("#export-start")
    page.wait_for_selector("#export-result:visible a")
    with page.expect_download() as download:
        page.click("#export-result a")
    assert download.value.suggested_filename == f"game-1-0.0-render-5-16.{form}"
    video = imageio.mimread(download.value.path(), form, memtest=False)
    assert len(video) == 12
    assert video[0].shape[:2] == (176, 264)
    assert abs(int(video[0][80, 8, 0]) - 200) < 12  # the left column, in red
    saved = project / "first" / "videos" / f"game-1-0.0-render-5-16.{form}"
    assert saved.read_bytes() == download.value.path().read_bytes()
    assert str(saved) in page.inner_text("#export-result")
    if form == "mp4":  # this browser plays it
        page.wait_for_function("() => document.querySelector('#export-result video').currentTime > 0")
    page.click("#export-close")
    page.keyboard.press("ArrowRight")
    at(page, 1)

    page.select_option("#renderer", "fails")
    page.click("#export")
    page.click("#export-start")
    page.wait_for_selector("#export-error:visible")
    assert "ValueError: nothing to see at 1" in page.inner_text("#export-error")


def test_without_renderers_and_without_episodes(browser, tmp_path):
    (tmp_path / "game").mkdir()
    server = RenderServer(Project(tmp_path / "game"), {})
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark")
    context.set_default_timeout(10_000)
    try:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("#stage .hint:has-text('No trial has episodes yet')")
        save(tmp_path / "game" / "first", 6)
        page.wait_for_function("() => document.getElementById('tick').textContent === '0 / 5'")  # it comes by itself
        page.wait_for_selector("#stage .hint:has-text('The launch file has none')")
        page.keyboard.press("End")
        page.wait_for_function("() => /tick\\s+5/.test(document.getElementById('fields').innerText)")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 400  # nothing sticks out
        assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 22)"
        server.close()
        page.wait_for_selector("#problem:has-text('does not answer')")
    finally:
        context.close()
        server.close()


def test_a_fast_hand_sees_what_it_chose_last(page):
    """Ticks, renderers and episodes chosen faster than they are answered."""
    for n in (5, 30, 12, 38, 21):
        page.fill("#slider", str(n))
    page.select_option("#renderer", "several")
    page.select_option("#renderer", "render")
    page.fill("#slider", "9")
    at(page, 9)
    assert pixel(page, 0, 0) == (200, 90, 40)
    assert page.locator("#stage figure").count() == 1
