"""From nothing to the first answer: build the wheel, install it into a new environment, and do what a new user does.

    python docs/scripts/fresh.py [--system-site-packages]

Prints seconds of each step and the size of the installation; ends with 1 where a step fails. docs/scripts/fresh.log
is such a run. pip takes torch from the index that it is set to: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
gives CPU torch. With --system-site-packages the environment sees the packages of the interpreter that runs this, and
only specdec itself is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages

ROOT = pages.DOCS.parent
EVALUATION = "specdec eval acceptance --data arithmetic --limit 2 -k 2 --max-new-tokens 24 --output a.json"


def timed(name: str, command: list[str], folder: Path) -> str:
    """Run it outside of the checkout and return its output; its last lines where it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(f"{time.monotonic() - begin:7.1f} s  {name}", flush=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def size(folder: Path) -> str:
    """Of all files below."""
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{total / 1e9:.2f} GB"


def installed(folder: Path, shared: bool) -> str:
    """Make the environment, install the wheel; the interpreter."""
    source = folder / "source"  # setuptools writes beside what it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "tests", "benchmarks"))
    building = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder), str(source)]
    timed("pip wheel", building, folder)
    timed("python -m venv", [sys.executable, "-m", "venv", "env"], folder)
    (wheel,) = folder.glob("*.whl")
    print(f"           the wheel has {wheel.stat().st_size / 1e6:.1f} MB")
    python = str(folder / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    if shared:
        site = next(folder.glob("env/lib/python*/site-packages"))
        seen = [path for path in sys.path if path.endswith("site-packages")]
        (site / "shared.pth").write_text("\n".join(seen), "utf-8")
        timed("pip install wheel", [*install, "--no-deps", "--ignore-installed", str(wheel)], folder)
    else:
        torch = next(line for line in (ROOT / "pyproject.toml").read_text("utf-8").splitlines() if '"torch>' in line)
        timed("pip install torch", [*install, torch.strip(' ",')], folder)
        timed("pip install wheel", [*install, str(wheel)], folder)
        print(f"           the environment has {size(folder / 'env')}")
        timed("pip install wheel[eval]", [*install, f"{wheel}[eval]"], folder)
        print(f"           the environment has {size(folder / 'env')} with extra [eval]")
    where = "import specdec, sys; sys.exit(0 if specdec.__file__.startswith(sys.prefix) else specdec.__file__)"
    timed("import specdec, from the wheel, first time", [python, "-c", where], folder)
    return python


def main() -> None:
    """Each command and, in one program, all python blocks of the quickstart: what a reader has typed so far."""
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = installed(folder, "--system-site-packages" in sys.argv)
        blocks = pages.blocks("index.md")
        told = [line for one in blocks if one.language == "bash" and not one.reason for line in one.code.splitlines()]
        for line in ("specdec", "specdec doctor", *(line for line in told if line.startswith("specdec ")), EVALUATION):
            timed(line, ["bash", "-c", f"env/bin/{line}"], folder)
        timed("examples/demo.py", [python, str(ROOT / "examples" / "demo.py")], folder)
        program = ""
        for place, block in enumerate(blocks, 1):
            if block.language == "python":
                start = "import time; _begin = time.monotonic()\n"
                end = f"print('\\n@@{{:7.1f}} s  quickstart, block {place}'.format(time.monotonic() - _begin))\n"
                program += start + block.code + end
        (folder / "quickstart.py").write_text(program, "utf-8")
        out = timed("the quickstart's python blocks, as one program", [python, "quickstart.py"], folder)
        print("\n".join(line[2:] for line in out.splitlines() if line.startswith("@@")))


if __name__ == "__main__":
    main()
