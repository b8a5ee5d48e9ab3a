"""Open pages of build/site, and an evaluation's report, in headless Chromium at 390 and 1,280 px; fail where one is
wider than its window.

    specdec eval acceptance --data arithmetic --limit 6 --report build/report.html
    python docs/scripts/browser.py [--images FOLDER]

Needs `pip install playwright` and a Chromium: its own (`playwright install chromium`), one on PATH, or $CHROMIUM.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PAGES = ("index", "how-to/migrate", "concepts/round", "reference/errors", "reference/metrics", "numbers")
BUILD = Path(__file__).resolve().parents[2] / "build"


def main() -> None:
    """Exit code 1 where a page is too wide or asks another host."""
    from playwright.sync_api import sync_playwright

    images = Path(sys.argv[sys.argv.index("--images") + 1]) if "--images" in sys.argv else None
    named = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in named if name and (path := shutil.which(name))), None)
    faults: list[str] = []
    files = {name: BUILD / "site" / f"{name}.html" for name in PAGES} | {"report": BUILD / "report.html"}
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=found, args=["--no-sandbox", "--headless=shell"])
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("request", lambda sent: None if sent.url.startswith("file:") else faults.append(sent.url))
            for name, file in files.items():
                page.goto(file.as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                print(f"{name} at {width}: {wide}")
                if wide > width:
                    faults.append(f"{name} at {width} px is {wide} px wide")
                if images is not None:
                    page.screenshot(path=str(images / f"{name.replace('/', '-')}-{width}.png"), full_page=False)
        browser.close()
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
