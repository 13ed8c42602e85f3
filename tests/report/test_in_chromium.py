"""The page as a person sees it: drawn by Chromium, in light and dark, with its read-outs, its browser of samples and its live refresh."""

import asyncio
import io
import json
import threading

from PIL import Image

from megatron_grpo.report import write_report
from megatron_grpo.report.watch import make_server
from tests.report.browser import Browser
from tests.report.made_run import make_run

LIGHT_PAGE, DARK_PAGE, LIGHT_RUNS, DARK_RUNS = (
    (0xF6, 0xF6, 0xF4),
    (0x12, 0x14, 0x17),
    [(0x2A, 0x78, 0xD6), (0xEB, 0x68, 0x34)],
    [(0x5A, 0x9C, 0xF0), (0xF0, 0x82, 0x4F)],
)
SECTIONS = ["runs", "alerts", "learning", "update", "mismatch", "replay", "rewards", "sampling", "time", "lengths", "samples", "others"]


def test_report_in_chromium(tmp_path):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=1, mismatch=lambda step: 4e-4 * (1 + step / 5) ** 2)
    with open(good / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 61, "metrics": \n'
            + json.dumps({"step": 60, "time": 1.7e9, "metrics": {"grad_norm": float("nan")}, "seconds": {}})
            + "\n"
        )
    (tmp_path / "empty").mkdir()
    page = write_report([str(good), str(bad)], str(tmp_path / "page.html"))
    blank = write_report([str(tmp_path / "empty")])
    asyncio.run(look(page, blank, good, tmp_path))


async def look(page, blank, good, tmp_path):
    async with Browser(str(tmp_path / "profile")) as browser:
        await browser.open(f"file://{page}#light", 1400, 900)
        await drawn(browser)
        for name, ground, paints in (("light", LIGHT_PAGE, LIGHT_RUNS), ("dark", DARK_PAGE, DARK_RUNS)):
            await browser.js(f"setTheme('{name}'); scrollTo(0, 0); tip.hide()")
            picture(await browser.picture(1400, 2000), tmp_path / f"{name}.png", ground, paints)
        await read_outs(browser)
        await browser.open(f"file://{page}", 420, 900)
        assert await browser.js("document.documentElement.scrollWidth") <= 420  # a narrow window scrolls in one direction
        await browser.open(f"file://{blank}", 1000, 700)
        assert "no metrics.jsonl" in await browser.js("document.querySelector('main').innerText")
        assert not browser.errors and all(url.startswith(("file:", "data:", "about:")) for url in browser.requests), (
            browser.errors,
            browser.requests,
        )
        await live(browser, good)
        assert not browser.errors, browser.errors


async def drawn(browser):
    assert await browser.js("[...document.querySelectorAll('main > section')].map(s => s.id)") == SECTIONS
    text = await browser.js("document.querySelector('main').innerText")
    for words in (
        "Held-out accuracy",
        "metrics.jsonl:68: not JSON",
        "Mismatch with the engine is rising",
        "grad_norm is not finite",
        "arXiv 2510.11370",
        "What the correction removed",
        "What is 17 + 25?",
    ):
        assert words in text, words
    charts = await browser.js("[...document.querySelectorAll('svg.chart')].map(c => [c.clientWidth, c.querySelectorAll('text').length])")
    assert all(width > 200 and texts > 4 for width, texts in charts), charts
    assert len(charts) >= 28
    verdicts = await browser.js("[...document.querySelectorAll('#mismatch .verdict li')].map(e => [e.className, e.innerText])")
    assert [name for name, _ in verdicts] == ["good", "bad"] and "not over 0.003" in verdicts[0][1] and "over 0.01" in verdicts[1][1], verdicts
    assert "NaN" not in await browser.js("document.querySelector('main').innerHTML") and "undefined" not in text
    assert await browser.js("document.querySelectorAll('#learning .card:first-child path').length") == 2  # one curve a run


async def read_outs(browser):
    await browser.hover("#learning .card svg.chart")
    read = await browser.js("document.getElementById('tip').innerText")
    step = int(read.split()[1])
    values = await browser.js(f"data.runs.map(r => number(r.metrics['reward/mean'].y[r.metrics['reward/mean'].x.indexOf({step})]))")
    assert 27 <= step <= 33 and read.split()[2:] == ["good", values[0], "bad", values[1]], read
    await browser.hover("#samples .tokens span")
    assert "ratio old / engine" in await browser.js("document.getElementById('tip').innerText")
    assert await browser.js("[...document.querySelectorAll('#samples .tokens span')].some(s => s.style.background)")
    await browser.js("document.querySelectorAll('#samples .list button')[5].click()")
    assert "5 in group 1" in await browser.js("document.querySelector('#samples .detail').innerText")
    await browser.js("document.querySelector('#others summary').click()")
    await browser.until("document.querySelector('#others').innerText.includes('my_hook/value')")
    await browser.js("(e => { e.value = 'hours'; e.dispatchEvent(new Event('change')); })(document.getElementById('axis'))")
    assert "hours since the first line" in await browser.js("document.querySelector('#learning').textContent")
    await browser.js("(e => { e.value = 0.6; e.dispatchEvent(new Event('input')); })(document.getElementById('smooth'))")
    await browser.until("document.querySelectorAll('#learning .card:first-child path').length === 4")  # smooth over raw
    await browser.js("document.querySelector('.run-name').click()")
    assert await browser.js("document.querySelectorAll('#learning .card:first-child path').length") == 2


def picture(png, path, ground, paints):
    path.write_bytes(png)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert image.size == (1400, 2000)
    assert image.getpixel((2, 1998)) == ground
    counts = {colour: n for n, colour in image.getcolors(1 << 24)}
    for paint in paints:
        assert counts.get(paint, 0) > 1000, (paint, counts.get(paint))
    assert counts[ground] < 0.6 * image.width * image.height  # most of the page is cards, not emptiness


async def live(browser, good):
    server = make_server([str(good)], 0, poll_seconds=0.2)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        await browser.open(f"http://127.0.0.1:{server.server_port}/", 1000, 700)
        await browser.until("document.getElementById('live').textContent.startsWith('● live')")
        with open(good / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 777, "time": 1.7e9 + 9000, "metrics": {"reward/mean": 0.9}, "seconds": {}}) + "\n")
        await browser.until("document.querySelector('#runs table').innerText.includes('777')")
        await browser.send("Page.navigate", url="about:blank")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
