"""The page in headless Chromium: what it draws, what a reader does with it, what it asks for."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from modelzoo_trainer.tools.report import watching
from modelzoo_trainer.tools.report.command import main
from tests.tools.report.run_lines import losses, to_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        pytest.skip(
            "needs Chromium (apt-get install chromium) and playwright (pip install playwright)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Page:
    """A page, and what it said and asked for."""

    def __init__(self, browser, address, **options):
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        self.page.on("console", lambda one: self.said.append(f"{one.type}: {one.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#loss .main-svg")

    def evaluate(self, code, argument=None):
        return self.page.evaluate(code, argument)

    def chart(self, title):
        return self.page.locator("figure[data-chart]", has=self.page.get_by_text(title, exact=True))

    def range_of(self, title):
        self.chart(title).scroll_into_view_if_needed()
        plot = self.chart(title).locator(".js-plotly-plot")
        return plot.evaluate("div => div._fullLayout.xaxis.range")

    def num_lines(self, title):
        return self.chart(title).locator(".scatterlayer .trace .lines path.js-line").count()

    def drag(self, title, start, end, height=0.0):
        box = self.chart(title).locator(".nsewdrag").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], middle)
        self.page.mouse.down()
        below = middle + 2 + height * box["height"]
        self.page.mouse.move(box["x"] + end * box["width"], below, steps=8)
        self.page.mouse.up()
        self.page.wait_for_timeout(600)  # Plotly waits for a second click


def write(folder: Path, num: int, scale: float) -> None:
    folder.mkdir(parents=True)
    lines = losses(num, scale=scale)
    for line in lines:
        if "loss" in line:
            line["train_loss_epoch"] = line["loss"]
        else:
            line["validate_0/loss"] = scale / line["step"] * 1.1
    lines[num // 2]["loss"] = "nan"
    (folder / "metrics.jsonl").write_text(to_text(lines))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two runs, one with a name that is markup."""
    folder = tmp_path_factory.mktemp("report")
    for name, num, scale in (("good", 200, 1.0), ("<img src=x onerror=alert(1)>", 120, 2.0)):
        write(folder / name, num, scale)
    runs = sorted(str(path) for path in folder.iterdir())
    assert main([*reversed(runs), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture
def page(browser, report):
    opened = Page(browser, report.as_uri())
    yield opened
    opened.page.close()


def test_nothing_is_asked_for_and_the_console_stays_empty(page, report):
    page.page.mouse.wheel(0, 20_000)
    page.page.wait_for_timeout(500)
    assert page.said == []
    assert page.requests == [report.as_uri()]
    loaded = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_the_page_may_not_ask_for_anything(page):
    blocked = page.evaluate("fetch('https://example.org').then(() => false, () => true)")
    assert blocked
    assert [text for text in page.said if "Content Security Policy" in text]


def test_hovering_shows_the_values_at_a_step(page):
    box = page.chart("loss").locator(".nsewdrag").first.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.chart("loss").locator(".hoverlayer .legend, .hoverlayer .hovertext").first
    label.wait_for(timeout=5000)
    text = label.text_content()
    assert "good" in text
    assert text.startswith("step ")
    assert any(char.isdigit() for char in text)


def test_dragging_zooms_all_charts_of_the_section_and_a_double_click_resets(page):
    whole = page.range_of("loss")
    page.drag("loss", 0.25, 0.5)
    low, high = page.range_of("loss")
    assert whole[0] < low < high < whole[1]
    assert page.range_of("train_loss_epoch") == [low, high]
    assert page.range_of("lr/0")[1] > high
    page.chart("loss").locator(".nsewdrag").first.dblclick()
    page.page.wait_for_timeout(600)
    assert page.range_of("loss") == whole


def test_the_legend_of_the_runs_hides_a_run_everywhere(page):
    assert page.num_lines("train_loss_epoch") == 2
    page.page.locator(".chip", has_text="good").click()
    page.page.wait_for_timeout(400)
    assert page.num_lines("train_loss_epoch") == 1
    page.page.locator(".chip", has_text="good").click()
    page.page.wait_for_timeout(400)
    assert page.num_lines("train_loss_epoch") == 2


def test_the_legend_of_a_chart_hides_a_curve(page):
    before = page.num_lines("loss")
    page.chart("loss").locator(".legendtoggle").nth(1).click()
    page.page.wait_for_timeout(600)
    assert (before, page.num_lines("loss")) == (4, 2)


def test_the_x_axis_can_be_time(page):
    page.page.select_option("#x-axis", "time")
    page.page.wait_for_timeout(300)
    assert "time since the start" in page.chart("loss").locator(".xtitle").text_content()


def test_losses_can_have_a_logarithmic_axis(page):
    page.page.check("#log-losses")
    kind = "div => div._fullLayout.yaxis.type"
    assert page.chart("loss").locator(".js-plotly-plot").evaluate(kind) == "log"
    page.chart("loss").locator("button.log").click()
    assert page.chart("loss").locator(".js-plotly-plot").evaluate(kind) == "linear"


def test_smoothing_keeps_the_raw_curve_in_the_background(page):
    before = page.num_lines("train_loss_epoch")
    page.page.locator("#smoothing").fill("0.9")
    page.page.wait_for_timeout(400)
    assert page.num_lines("train_loss_epoch") == 2 * before


def test_a_value_that_is_not_finite_is_marked(page):
    marks = (
        page.chart("loss")
        .locator(".js-plotly-plot")
        .evaluate("div => div.data.filter(t => t.yaxis === 'y2').map(t => t.text[0])")
    )
    assert marks == ["nan", "nan"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.001] * 3, [0, 0.002]),
        ([-3, -3, -3], [-6, 0]),
        ([0.1, 0.1 + 1e-9, 0.1], [0, 0.2]),
        ([0.1, 0.101, 0.1], None),
    ],
)
def test_a_constant_is_drawn_on_an_axis_of_its_size(values, shown, browser, tmp_path):
    lines = [{"step": step, "loss": 1 / step, "lr/0": values[step - 1]} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text(to_text(lines))
    assert main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    opened = Page(browser, (tmp_path / "report.html").as_uri())
    plot = opened.chart("lr/0").locator(".js-plotly-plot")
    low, high = plot.evaluate("div => div._fullLayout.yaxis.range")
    opened.page.close()
    if shown is None:
        assert 0.09 < low < 0.1 < high < 0.11
    else:
        assert [low, high] == pytest.approx(shown)


def test_a_metric_can_be_found(page):
    page.page.fill("#find", "lr")
    shown = page.page.locator("figure[data-chart]:visible figcaption code").all_text_contents()
    assert shown == ["lr/0"]
    assert not page.page.locator("#none-found").is_visible()
    page.page.fill("#find", "zzz")
    assert page.page.locator("#none-found").is_visible()


def test_a_name_that_is_markup_is_text(page):
    assert page.page.locator("img").count() == 0
    assert page.page.locator(".chip", has_text="<img src=x onerror=alert(1)>").count() == 1
    ticks = page.page.locator("#timeline .ytick").all_text_contents()
    assert any("<img src=x" in tick for tick in ticks)


def test_charts_follow_the_color_scheme(browser, report):
    dark = Page(browser, report.as_uri(), color_scheme="dark")
    font = "div => div._fullLayout.font.color"
    assert dark.chart("loss").locator(".js-plotly-plot").evaluate(font) == "#e4e8ed"
    dark.page.emulate_media(color_scheme="light")
    dark.page.wait_for_timeout(400)
    assert dark.chart("loss").locator(".js-plotly-plot").evaluate(font) == "#1d232b"
    assert dark.said == []
    dark.page.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The address of the report of a run in `tmp_path / "run"` that is watched."""
    monkeypatch.setattr(watching, "_INTERVAL_S", 0.1)
    write(tmp_path / "run", 50, 1.0)
    server = watching.make_server([tmp_path / "run"], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def go_on(page, folder, num):
    """Write more steps of a run, and wait until its page shows them."""
    shutil.rmtree(folder)
    write(folder, num, 1.0)
    page.page.locator(".tile", has_text=str(num)).wait_for(timeout=20_000)
    page.page.wait_for_selector("#loss .main-svg")


def test_a_page_that_is_watched_refreshes_itself_and_keeps_its_settings(browser, served, tmp_path):
    opened = Page(browser, served)
    opened.page.select_option("#x-axis", "time")
    assert opened.page.locator(".tile", has_text="50").text_content() == "Steps50"
    go_on(opened, tmp_path / "run", 80)
    assert opened.page.input_value("#x-axis") == "time"
    assert {url.removeprefix(served) for url in opened.requests} == {"", "version"}
    assert opened.said == []
    opened.page.close()


def test_a_page_that_is_watched_keeps_the_zoom_until_a_double_click(browser, served, tmp_path):
    opened = Page(browser, served)
    heights = "div => div._fullLayout.yaxis.range"
    plot = opened.chart("loss").locator(".js-plotly-plot")
    whole = plot.evaluate(heights)
    opened.drag("loss", 0.25, 0.5, height=0.3)
    kept, height = opened.range_of("loss"), plot.evaluate(heights)
    assert height != whole
    go_on(opened, tmp_path / "run", 80)
    assert opened.range_of("loss") == opened.range_of("train_loss_epoch") == kept
    assert plot.evaluate(heights) == height
    opened.drag("loss", 0.25, 0.5)
    assert opened.range_of("loss")[1] < kept[1]
    opened.chart("loss").locator(".nsewdrag").first.dblclick()
    opened.page.wait_for_timeout(600)
    assert opened.range_of("train_loss_epoch")[1] > 79
    assert plot.evaluate(heights) == pytest.approx(whole, rel=0.1)
    go_on(opened, tmp_path / "run", 90)
    assert opened.range_of("loss")[1] > 89
    assert opened.said == []
    opened.page.close()


def test_a_zoom_of_the_time_axis_is_kept_in_another_unit(browser, served, tmp_path):
    opened = Page(browser, served)
    opened.page.select_option("#x-axis", "time")
    opened.drag("loss", 0.25, 0.5)
    low, high = opened.range_of("loss")
    go_on(opened, tmp_path / "run", 300)
    assert "(min)" in opened.chart("loss").locator(".xtitle").text_content()
    assert opened.range_of("loss") == pytest.approx([low / 60, high / 60])
    opened.page.close()


def written(folder, **runs):
    """Open a report of some runs: their lines of metrics, and the steps of an epoch."""
    for name, (lines, per_epoch) in runs.items():
        logs = folder / name / "logs" / "1"
        logs.mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text(to_text(lines))
        events = [{"time": 1.0, "event": "train_start", "step": 0, "steps_per_epoch": per_epoch}]
        (logs / "events.jsonl").write_text(to_text(events))
    out = folder / "report.html"
    assert main([*(str(folder / name) for name in runs), "-o", str(out)]) == 0
    return out


@pytest.fixture
def compare(browser, tmp_path):
    opened = []

    def compare(**runs):
        opened.append(Page(browser, written(tmp_path, **runs).as_uri()))
        return opened[0]

    yield compare
    opened[0].page.close()
    assert opened[0].said == []


def stripes(page, title):
    """Return the first and last x of each curve's stripes, with its run."""
    page.chart(title).scroll_into_view_if_needed()
    page.page.wait_for_timeout(300)
    plot = page.chart(title).locator(".js-plotly-plot")
    return plot.evaluate(
        """div => div.data.filter(t => t.meta && t.meta.over !== undefined)
            .map(t => [t.meta.over, t.x[0], t.x.filter(x => x !== null).pop()])"""
    )


def equal(page, title):
    return page.chart(title).locator(".equal").text_content()


def test_a_curve_over_another_is_striped_until_one_of_them_is_hidden(compare):
    page = compare(first=(losses(60), 10), second=(losses(60), 10), third=(losses(60), 10))
    assert stripes(page, "loss") == [[1, 1, 60], [2, 1, 60], [2, 1, 60]]
    assert page.num_lines("loss") == 3 + 3
    page.page.locator("#legend .chip", has_text="first").click()
    assert stripes(page, "loss") == [[2, 1, 60]]
    page.page.locator("#legend .chip", has_text="second").click()
    assert stripes(page, "loss") == []


def test_only_the_part_is_striped_where_curves_coincide(compare):
    def lines(late):
        return [
            {"step": step, "loss": 9 / step + late * (step > 40), "lr/0": 1e-9 * late + step}
            for step in range(1, 101)
        ]

    page = compare(first=(lines(0), 10), second=(lines(5), 10))
    assert stripes(page, "loss") == [[1, 1, 40]]
    assert stripes(page, "lr/0") == [[1, 1, 100]]


def test_curves_that_only_cross_are_not_striped(compare):
    first = [{"step": step, "loss": step / 100} for step in range(1, 101)]
    second = [{"step": step, "loss": 1 - step / 100} for step in range(1, 101)]
    page = compare(first=(first, 10), second=(second, 10))
    assert stripes(page, "loss") == []


def test_what_coincides_is_said_for_the_x_axis_that_is_shown(compare):
    lines = losses(60)
    page = compare(first=(lines, 10), second=(lines, 20), third=(lines, 10))
    assert equal(page, "lr/0") == "first = second = third"
    assert len(stripes(page, "loss")) == 3
    page.page.select_option("#x-axis", "epoch")
    assert stripes(page, "loss") == [[2, 0.1, 6]]  # the third covers the first
    assert equal(page, "loss") == "first = third"
    page.page.select_option("#x-axis", "step")
    page.page.wait_for_timeout(300)
    assert equal(page, "loss") == "first = second = third"


def test_what_is_not_found_leaves_no_heading_and_no_list_behind(browser, tmp_path):
    lines = [
        {"step": step, "loss": 1.0, "grad_norm": 2.0, "time_remaining": 9.0, "progress": 1}
        for step in range(1, 5)
    ]
    page = Page(browser, written(tmp_path, run=(lines, 2)).as_uri())
    headings = page.page.locator("h2:visible")
    before = headings.all_text_contents()
    assert "Other metrics" in before
    page.page.fill("#find", "norm")
    assert headings.all_text_contents() == ["Overview", "Norms"]
    assert page.page.locator("nav a:visible").all_text_contents() == ["Overview", "Norms"]
    page.page.fill("#find", "progress")
    assert not page.page.locator("details.more").is_visible()
    page.page.fill("#find", "remaining")
    assert page.chart("time_remaining").is_visible()
    page.page.fill("#find", "")
    assert headings.all_text_contents() == before
    assert not page.chart("time_remaining").is_visible()
    page.page.close()


def test_a_restart_is_a_gap_in_time_and_a_mark_at_its_step(browser, tmp_path):
    lines = [{"step": s, "time": s + 1000.0 * (s > 5), "loss": 1 / s} for s in range(1, 11)]
    events = [
        {"time": 0.0, "event": "start", "step": 0},
        {"time": 0.5, "event": "train_start", "step": 0},
        {"time": 5.5, "event": "end", "step": 5, "outcome": "failed"},
        {"time": 1005.0, "event": "start", "step": 5},
        {"time": 1005.5, "event": "train_start", "step": 5},
    ]
    (tmp_path / "logs" / "1").mkdir(parents=True)
    (tmp_path / "logs" / "1" / "events.jsonl").write_text(to_text(events))
    (tmp_path / "metrics.jsonl").write_text(to_text(lines))
    assert main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    page = Page(browser, (tmp_path / "report.html").as_uri())
    plot = page.chart("loss").locator(".js-plotly-plot")
    gaps = "div => div.data[0].x.map((x, at) => (x === null ? at : -1)).filter(at => at >= 0)"
    marks = "div => div.layout.shapes.map(one => one.x0)"
    assert (plot.evaluate(gaps), plot.evaluate(marks)) == ([], [5])
    page.page.select_option("#x-axis", "time")
    page.page.wait_for_timeout(300)
    assert (plot.evaluate(gaps), plot.evaluate(marks)) == ([5], [])
    assert page.said == []
    page.page.close()


def test_memory_is_drawn_from_zero_and_charts_stand_side_by_side(browser, tmp_path):
    long = "memory/a_name_that_leaves_no_room_for_the_buttons_on_the_same_line_of_its_caption_gib"
    lines = [{"step": s, "loss": 1 / s, "memory/gib": 9 + s / 99, long: 9} for s in (1, 2, 3)]
    page = Page(browser, written(tmp_path, run=(lines, 2)).as_uri())
    low, high = (
        page.chart("memory/gib")
        .locator(".js-plotly-plot")
        .evaluate("div => div._fullLayout.yaxis.range")
    )
    assert low == 0 < 9 < high
    first, second = (
        page.chart(name).locator(".plot").bounding_box() for name in ("memory/gib", long)
    )
    assert first["y"] == second["y"]
    page.page.close()


def test_links_stay_visible_and_lead_below_the_bar(page):
    page.page.locator("nav a", has_text="Timeline").click()
    page.page.wait_for_timeout(400)
    bar = page.page.locator("#controls").bounding_box()
    assert bar["y"] == 0
    assert page.page.locator("nav a", has_text="Overview").bounding_box()["y"] < bar["height"]
    heading = page.page.locator("#time h2")
    assert heading.bounding_box()["y"] >= bar["height"] or page.evaluate(
        "scrollY + innerHeight >= document.documentElement.scrollHeight - 1"
    )


def test_a_table_that_goes_on_beyond_the_page_says_so(page):
    hint = page.page.locator("#overview .scroll + .hint")
    assert not hint.is_visible()
    page.page.set_viewport_size({"width": 500, "height": 900})
    page.page.wait_for_timeout(300)
    assert hint.is_visible()
    assert "goes-on" in page.page.locator("#overview .scroll").get_attribute("class")
    page.evaluate("document.querySelector('#overview .scroll').scrollLeft = 9999")
    page.page.wait_for_timeout(300)
    assert "goes-on" not in page.page.locator("#overview .scroll").get_attribute("class")
