"""Protects unit 00: it opens from `pipeschool lab` in a real browser and runs top to bottom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "course" / "00_start_here" / "start_here.ipynb"

# Nothing but the course: no sandbox (CI is root), no GPU, no talk with the outside.
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# A learner's JupyterLab, but it never saves over the committed notebook, asks for no news, and
# keeps in the page the cells that are off the screen.
LAB_SETTINGS = {
    "docmanager-extension/plugin": {"autosave": False},
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
    "notebook-extension/tracker": {"windowingMode": "none"},
}

# What a person sees. JupyterLab shows a traceback as it shows stderr, in red: a learner's first
# notebook should have neither.
LOOK = """() => ({
    prompts: [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')]
        .map(prompt => prompt.textContent.trim().replace(':', '')),
    red: [...document.querySelectorAll('[data-mime-type="application/vnd.jupyter.stderr"]')]
        .map(output => output.innerText),
    images: [...document.querySelectorAll('.jp-Notebook .jp-Cell img')]
        .map(image => ({ alt: image.alt, width: image.naturalWidth })),
})"""
# The page says "idle" even before there is a kernel, and what is run then is lost. The session
# knows.
KERNEL_IS_IDLE = """() => {
    const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
    const kernel = context?.isReady && context.session?.kernel;
    return kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
# "Run All Cells" marks every cell [*] at once; a failing cell takes the mark off the rest.
FINISHED = f"""() => {{
    const {{ prompts }} = ({LOOK})();
    return prompts.some(prompt => /\\d/.test(prompt)) && !prompts.includes('[*]');
}}"""


@pytest.fixture
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no Chromium on the PATH, so the course is not opened in a browser"
    if os.environ.get("PIPESCHOOL_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home directory, but for JupyterLab's settings."""
    home = tmp_path / "home"
    config = home / ".jupyter" / "jupyter_lab_config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"LabApp": {"expose_app_in_browser": true}}')  # for KERNEL_IS_IDLE
    for name, values in LAB_SETTINGS.items():
        file = home / ".jupyter/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return home


@pytest.fixture
def lab_url(home: Path) -> Iterator[str]:
    """The address `pipeschool lab` prints; afterwards nothing it started may be left running."""
    outside = {name: value for name, value in os.environ.items() if "JUPYTER" not in name}
    command = [Path(sys.executable).with_name("pipeschool"), "lab", "--no-browser"]
    log = home / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", str(free_port())],
            cwd=ROOT,
            env=outside | {"HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield printed_url(server, log)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
        _, left = psutil.wait_procs(processes_with(home), timeout=5)
        names = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        server.wait()
    assert not names, "still running after the lab was stopped"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def printed_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"http://(localhost|127\.0\.0\.1):\d+/\S*", log.read_text()):
            return found[0]
        time.sleep(0.1)
    pytest.fail(f"`pipeschool lab` printed no address:\n{log.read_text()}")


def processes_with(home: Path) -> list[psutil.Process]:
    """Every process of this lab, kernels and workers too: they alone have this home directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                found.append(process)
    return found


@contextlib.contextmanager
def browser_page(chromium: str, profile: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=chromium,
            args=CHROMIUM_FLAGS,
            viewport={"width": 1400, "height": 1000},
        )
        try:
            yield context.pages[0]
        finally:
            context.close()


def run_all_cells(page: Page, url: str, path: str) -> None:
    """Open the notebook at `path` below the lab's folder and run it from the menu, as a person."""
    address = urlsplit(url)
    page.goto(f"{address.scheme}://{address.netloc}/lab/tree/{path}?{address.query}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    page.wait_for_function(KERNEL_IS_IDLE, polling=200, timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(FINISHED, polling=200, timeout=180_000)
    page.wait_for_function(KERNEL_IS_IDLE, polling=200, timeout=60_000)


def save_screenshot(page: Page, file: Path) -> None:
    """The whole notebook in one picture: the window is made as tall as what it shows."""
    height = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.jp-Notebook, .jp-Notebook *')]"
        ".map(element => element.scrollHeight))"
    )
    page.set_viewport_size({"width": 1400, "height": min(height + 200, 12_000)})
    page.locator(".jp-Notebook .jp-Cell").first.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # cells that were off the screen are drawn now
    page.screenshot(path=file)


@pytest.mark.browser
@pytest.mark.xdist_group("alone")
def test_start_here_runs_in_a_browser(
    chromium: str, home: Path, lab_url: str, tmp_path: Path
) -> None:
    before = NOTEBOOK.read_bytes()

    with browser_page(chromium, tmp_path / "profile") as page:
        try:
            run_all_cells(page, lab_url, NOTEBOOK.relative_to(ROOT / "course").as_posix())
        finally:
            save_screenshot(page, tmp_path / "start_here.png")
        seen = page.evaluate(LOOK)

    assert not seen["red"], "\n".join(seen["red"])
    not_run = [prompt for prompt in seen["prompts"] if not re.fullmatch(r"\[\d+\]", prompt)]
    assert seen["prompts"] and not not_run, f"cells that did not run: {not_run}"
    assert seen["images"], "no picture is shown"
    assert all(image["width"] > 0 for image in seen["images"]), "a picture did not load"
    assert all(image["alt"].strip() for image in seen["images"]), "a picture has no alt text"
    assert NOTEBOOK.read_bytes() == before, "running the notebook changed the committed file"
