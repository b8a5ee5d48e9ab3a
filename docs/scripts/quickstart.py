"""Run the quickstart as a new user does: build the wheel, install it, run the page's blocks one by one.

    python docs/scripts/quickstart.py [--system-site-packages]

The environment is new and temporary. With --system-site-packages it sees the packages of the interpreter that runs this
(torch is large), so that only specdec itself is installed. Prints seconds of each block; ends with 1 where one fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages

ROOT = pages.DOCS.parent


def timed(name: str, command: list[str], folder: Path) -> None:
    """Run it outside of the checkout; its last lines where it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(f"{time.monotonic() - begin:7.1f} s  {name}", flush=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> None:
    """Each bash line and, in one program, all python blocks up to each: what a reader has typed so far."""
    shared = "--system-site-packages" in sys.argv
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        building = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", name, str(ROOT)]
        timed("pip wheel", building, folder)
        timed("python -m venv", [sys.executable, "-m", "venv", "env"], folder)
        (wheel,) = folder.glob("*.whl")
        python = str(folder / "env" / "bin" / "python")
        if shared:
            site = next(folder.glob("env/lib/python*/site-packages"))
            seen = [path for path in sys.path if path.endswith("site-packages")]
            (site / "shared.pth").write_text("\n".join(seen), "utf-8")
        deps = ["--no-deps", "--ignore-installed"] if shared else []
        timed("pip install wheel", [python, "-m", "pip", "install", "--quiet", *deps, str(wheel)], folder)
        where = "import specdec, sys; sys.exit(0 if specdec.__file__.startswith(sys.prefix) else specdec.__file__)"
        timed("import specdec, from the wheel", [python, "-c", where], folder)
        program = ""
        for place, block in enumerate(pages.blocks("index.md"), 1):
            if block.language == "bash" and not block.reason:
                for line in block.code.splitlines():
                    if line.startswith("specdec "):
                        timed(line, ["bash", "-c", f"env/bin/{line}"], folder)
            elif block.language == "python":
                start = "import time; _begin = time.monotonic()\n"
                end = f"print('\\n@@ block {place}', round(time.monotonic() - _begin, 1), 's')\n"
                program += start + block.code + end
        (folder / "quickstart.py").write_text(program, "utf-8")
        done = subprocess.run([python, "quickstart.py"], cwd=folder, capture_output=True, text=True)
        print("\n".join(line[3:] for line in done.stdout.splitlines() if line.startswith("@@")))
        if done.returncode:
            sys.exit(done.stderr[-2000:])


if __name__ == "__main__":
    main()
