"""The command `specdec doctor`: what an issue report needs, and what is missing here.

Everything is found out without loading a model. A package that cannot be imported is a line of the output, no error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from attention.errors import manual, named_error
from specdec.cli.lazy import DISTRIBUTION, PluginError, checkout, find_plugins
from specdec.cli.options import examples, flag
from specdec.import_names import ROOT, check_sibling, other_distribution, version_of
from specdec.user_warnings import busy_cores
from specdec.values import Json, size

_PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "triton",
    "flashinfer-python",
    "nvmath-python",
)
_OF_A_CHECKOUT = ("dev", "docs")
"""Extras that serve nobody without the tests and the site's sources."""
_SIBLINGS = ("attention", "drafters")
_SETTINGS = ("SPECDEC_DATA", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TRITON_INTERPRET")
"""Variables of the environment that change what runs."""


@click.command(epilog=examples("specdec doctor", "specdec doctor --json"))
@flag("--json as_json", "The facts as one JSON object.")
def doctor(as_json: bool) -> None:
    """Show the environment, the GPU, the caches, and which extras are missing. Put it into an issue report.

    Nothing is sent anywhere, no model is loaded, nothing is deleted. Your home folder is written as ~. Exit status: 0,
    or 1 where something keeps specdec from working.
    """
    facts = examined()
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        for line in in_lines(facts):
            click.echo(line)
    sys.exit(1 if facts["problems"] else 0)


def examined() -> Json:
    """What the command prints, by section."""
    wanted, extras = requirements()
    device = device_facts()
    return {
        "specdec": {
            "version": version_of(DISTRIBUTION),
            "folder": _short(ROOT),
            "docs and examples": _short(manual() or ROOT),
        },
        "system": system_facts(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "device": device,
        "extras": {name: extra_facts(name, needed) for name, needed in extras.items()},
        "caches": cache_facts(),
        "settings": {name: _short(os.environ[name]) for name in _SETTINGS if name in os.environ},
        "problems": [
            *filter(None, [other_distribution()]),
            *shadowed(),
            *(f"{each} is needed: pip install '{each}'" for each in unmet(wanted)),
        ]
        + ([device["error"]] if "error" in device else []),
        "hints": hints(device),
    }


def requirements(root: Path = ROOT) -> tuple[list[str], dict[str, list[str]]]:
    """What this distribution needs and each extra adds, by the checkout at `root`, else by the installed metadata."""
    if project := checkout(root):
        return project["dependencies"], project["optional-dependencies"]
    try:
        found = metadata(DISTRIBUTION)
    except PackageNotFoundError:
        return [], {}
    given = found.get_all("Requires-Dist") or []
    needed = applying(given, "")
    extras = [name for name in found.get_all("Provides-Extra") or [] if name not in _OF_A_CHECKOUT]
    return needed, {name: [each for each in applying(given, name) if each not in needed] for name in extras}


def applying(given: list[str], extra: str) -> list[str]:
    """Those requirements of a distribution's metadata that hold here with this extra, without their markers."""
    from packaging.requirements import Requirement

    read = [Requirement(each) for each in given]
    held = [each for each in read if each.marker is None or each.marker.evaluate({"extra": extra})]
    return [str(each).partition(";")[0].strip() for each in held]


def unmet(needed: list[str]) -> list[str]:
    """Requirements that are not installed, or in another version. Extras of this distribution are left out."""
    from packaging.requirements import Requirement

    missing = []
    for text in needed:
        requirement = Requirement(text)
        if requirement.name == DISTRIBUTION or (requirement.marker is not None and not requirement.marker.evaluate()):
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier}")
    return missing


def extra_facts(name: str, needed: list[str]) -> Json:
    """Whether an extra is there; if not, what it lacks and how to get it."""
    missing = unmet(needed)
    return {"present": not missing} | (
        {"missing": missing, "install": f'pip install "{DISTRIBUTION}[{name}]"'} if missing else {}
    )


def shadowed() -> list[str]:
    """Messages for our packages whose name another distribution owns here, and for commands that cannot be loaded."""
    checks: list[Callable[[], object]] = [partial(check_sibling, name) for name in _SIBLINGS]
    try:
        checks += [plugin.load for plugin in find_plugins(()).values()]
    except PluginError as error:
        return [str(error)]
    found = []
    for check in checks:
        try:
            check()
        except (ImportError, PluginError) as error:
            found.append(str(error))
    return found


def system_facts() -> Json:
    """Python and the machine."""
    facts: Json = {
        "python": platform.python_version(),
        "executable": _short(sys.executable),
        "platform": platform.platform(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return facts


def device_facts() -> Json:
    """What torch sees: its CUDA or HIP version, and each GPU. "error" where torch cannot be imported."""
    try:
        import torch
    except Exception as error:
        return {"error": f"torch cannot be imported: {named_error(error)}"}
    facts: Json = {"torch built for": _built_for(torch), "CPU threads": torch.get_num_threads(), "GPUs": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            facts["GPUs"].append(f"{found.name}, {size(found.total_memory)}, compute {found.major}.{found.minor}")
    return facts


def _built_for(torch: Any) -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def hints(device: Json) -> list[str]:
    """What would run, but slower than it could."""
    if not device.get("GPUs"):
        built = device.get("torch built for", "")
        busy = busy_cores(device.get("CPU threads", 1))
        text = "; torch is built for CUDA and would use one" if built.startswith("CUDA") else ""
        return [f"no GPU: the torch backend serves on the CPU{text}", *filter(None, [busy])]
    if version_of("flashinfer-python") is None and str(device["torch built for"]).startswith("CUDA"):
        return [f'FlashInfer is missing: rounds are slower without it; pip install "{DISTRIBUTION}[cuda]"']
    return []


def cache_facts() -> Json:
    """Where each cache lies (None where that cannot be found out), how large it is, and the variable that moves it."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    triton = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    folders: dict[str, tuple[Path | None, str]] = {
        "specdec (self-tests, matmul algorithms)": (_found("specdec.run_files:cache_folder"), "XDG_CACHE_HOME"),
        "Triton": (Path(os.environ.get("TRITON_CACHE_DIR") or triton), "TRITON_CACHE_DIR"),
        "torch.compile": (
            _found("torch._inductor.runtime.cache_dir_utils:default_cache_dir", "TORCHINDUCTOR_CACHE_DIR"),
            "TORCHINDUCTOR_CACHE_DIR",
        ),
        "FlashInfer workspace": (base / ".cache" / "flashinfer", "FLASHINFER_WORKSPACE_BASE"),
        "Hugging Face hub": (_found("huggingface_hub.constants:HF_HUB_CACHE"), "HF_HUB_CACHE"),
    }
    return {
        name: {"folder": None if folder is None else _short(folder), "size": _held(folder), "moved by": variable}
        for name, (folder, variable) in folders.items()
    }


def _found(name: str, variable: str = "") -> Path | None:
    """The folder that a variable, or else a name of another package ("module:name"), gives; None where none does."""
    try:
        found = os.environ.get(variable) or resolve_name(name)
        return Path(found() if callable(found) else found)
    except Exception:  # a package is missing, or keeps the name elsewhere
        return None


def _held(folder: Path | None) -> str:
    """What the files in a folder take, links not followed; "empty" where there is none."""
    total = 0
    for parent, _, names in os.walk(folder or ""):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return size(total) if total else "empty"


def in_lines(facts: Json) -> list[str]:
    """The facts as plain text, a section after the other; problems and hints last."""
    lines = []
    for section in ("specdec", "system", "packages", "device", "settings"):
        lines += [f"{section}:", *(f"  {name}: {_word(value)}" for name, value in facts[section].items()), ""]
    lines.append("extras:")
    for name, extra in facts["extras"].items():
        state = "present" if extra["present"] else f"missing {', '.join(extra['missing'])}: {extra['install']}"
        lines.append(f"  {name}: {state}")
    lines.append("")
    lines.append("caches (can be deleted while nothing runs; the next start builds, or downloads, again):")
    for name, cache in facts["caches"].items():
        lines.append(f"  {name}: {cache['folder'] or 'unknown'}, {cache['size']} (moved by {cache['moved by']})")
    lines += ["", *(f"PROBLEM: {problem}" for problem in facts["problems"])]
    lines += [f"note: {hint}" for hint in facts["hints"]]
    return [*lines, "" if facts["problems"] else "No problem found."]


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return "not installed" if value is None else str(value)


def _short(path: str | Path) -> str:
    """A path with the home folder as ~."""
    home = str(Path.home())
    text = str(path)
    return f"~{text[len(home) :]}" if text == home or text.startswith(home + os.sep) else text
