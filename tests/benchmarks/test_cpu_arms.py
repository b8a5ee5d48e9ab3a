"""The arms of bench_cpu on a tiny model, and the process of llama.cpp with a server that stands in for its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from fakes import LETTERS, tiny_llama

from benchmarks.cpu_arms import Outcome, Setting, llama_arm, specdec_arm, transformers_arms
from tests.gguf_files import written

PROMPTS = [[3, 5, 7, 3, 5], [4, 6, 8]]
STUB = '''
"""A server that answers with the prompt's tokens, repeated."""
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

ggml_type = SimpleNamespace(GGML_TYPE_F16=1, GGML_TYPE_F32=0)
common_speculative_type = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE=6)

def get_system_info():
    return "AVX2"

class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = (SimpleNamespace() for _ in range(3))
        self.speculative = SimpleNamespace(types=[], ngram_simple=SimpleNamespace())

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, new = asked["prompt"], asked["n_predict"]
        assert asked["logit_bias"] == [[0, False]] and asked["temperature"] == 0 and not asked["cache_prompt"]
        tokens = (prompt * new)[: 1 if prompt == [9] else new]
        reply = {"tokens": tokens, "tokens_evaluated": len(prompt), "timings": {"draft_n": 3, "draft_n_accepted": 2}}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *rest):
        pass

class Server:
    def __init__(self, params):
        assert (params.n_parallel, params.n_ctx, params.cpuparams.n_threads) == (2, 512, 1)
        assert params.speculative.types == [6] and params.speculative.ngram_simple.size_m == 8
        own = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=own.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{own.server_port}"
'''


def setting(model: Path) -> Setting:
    return Setting(model, "float32", 1, 6, [0], 5)


def test_all_arms_of_a_float32_model_give_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")
    file = written(tiny_llama(), tmp_path / "tiny.gguf", tokens=LETTERS)
    (liked, *_), _ = transformers_arms(replace(setting(file), suppress=[]))[0].run(PROMPTS).answers
    own = replace(setting(file), suppress=[liked])
    arms = [*transformers_arms(own), *(specdec_arm(own, "", draft, k, 1) for draft, k in ((None, 0), ("lookup", 2)))]
    found = [arm.run(PROMPTS) for arm in arms] + [specdec_arm(own, "", None, 0, 2).run(PROMPTS)]
    assert [each.answers for each in found] == [found[0].answers] * 5
    assert all(len(answer) == 6 and liked not in answer for answer in found[0].answers)
    assert found[0].rounds == found[2].rounds == 12 and (found[3].rounds or 0) <= 12 and found[4].rounds is None
    assert all(each.wall_s > 0 and each.cpu_s > 0 for each in found)


def test_llama_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text(STUB)
    (tmp_path / "xllamacpp-1.5.dist-info").mkdir()
    (tmp_path / "xllamacpp-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: xllamacpp\nVersion: 1.5\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arm = llama_arm(setting(tmp_path), "llama.cpp", Path(sys.executable), tmp_path / "m.gguf", 2, ["SIMPLE", 3, 8])
    assert arm.facts == {"xllamacpp": "1.5", "system": "AVX2", "ngram": ["SIMPLE", 3, 8]}
    found = arm.run(PROMPTS)
    assert found.answers == [[3, 5, 7, 3, 5, 3], [4, 6, 8, 4, 6, 8]]
    assert 0 < found.cpu_s < 5 and found.rounds is None
    with pytest.raises(click.ClickException, match=r"llama\.cpp: its process ended with exit code 1"):
        arm.run([[9]])  # ends early
    arm.close()


def test_an_outcome_has_rounds_only_of_one_prompt_at_once() -> None:
    assert Outcome([], 1.0, 1.0).rounds is None
