"""llama.cpp in a process of its own, asked by lines on its standard input. Needs the package xllamacpp alone.

    VENV/bin/python benchmarks/llama_child.py MODEL.gguf '{"threads": 1, "rows": 1, "row_tokens": 2048, "ngram": null}'

The first line that it writes says what runs: {"xllamacpp": version, "system": instruction sets}. Then a line
{"prompts": [token ids of each], "new": N, "suppress": ids} is answered by {"answers": [token ids of each], "wall_s",
"cpu_s" (of the whole process), "drafted", "accepted"}; all prompts of a line are in the server at once. Decoding is
greedy, and no request starts from another one's tokens. Setting "ngram" is [kind, size of the match, most drafts]:
"SIMPLE" is xllamacpp's COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE. "cache" is the type of keys and values, "F16" by default.

The server listens on 127.0.0.1 at a free port, because the binding's own calls return text and no token ids.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import xllamacpp


def server(model: str, setting: dict[str, Any]) -> Any:
    """A server with so many slots of so many tokens each; everything else is llama.cpp's default."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = setting["rows"], setting["rows"] * setting["row_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setting["threads"]
    params.cache_prompt, params.cache_ram_mib, params.fit_params, params.verbosity = False, 0, False, 1
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{setting.get('cache', 'F16')}")
    params.cache_type_k = params.cache_type_v = kind
    if setting.get("ngram"):
        name, size, most = setting["ngram"]
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_NGRAM_{name}")]
        own = getattr(params.speculative, f"ngram_{name.lower()}")
        own.size_n, own.size_m = size, most
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], new: int, suppress: list[int]) -> dict[str, Any]:
    """One request. Raises RuntimeError: it was refused, or ended early."""
    asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    asked["logit_bias"] = [[token, False] for token in suppress]
    place = urlsplit(address)
    connection = HTTPConnection(place.hostname or "", place.port)
    connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    found: dict[str, Any] = json.loads(reply.read())
    connection.close()
    if reply.status != 200 or len(found["tokens"]) != new or found["tokens_evaluated"] != len(prompt):
        raise RuntimeError(f"llama.cpp, {len(prompt)} tokens and {new} new ones: {str(found)[:500]}")
    return found


def answered(address: str, line: str) -> dict[str, Any]:
    """What a line asks for."""
    asked = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(asked["prompts"])) as pool:
        found = list(pool.map(lambda ids: complete(address, ids, asked["new"], asked["suppress"]), asked["prompts"]))
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    counts = {
        name: sum(each["timings"].get(key, 0) for each in found)
        for name, key in (("drafted", "draft_n"), ("accepted", "draft_n_accepted"))
    }
    return {"answers": [each["tokens"] for each in found], **spent, **counts}


def main() -> None:
    """Serve lines until there are no more."""
    model, setting = sys.argv[1], json.loads(sys.argv[2])
    own = server(model, setting)
    said: dict[str, Any] = {"xllamacpp": version("xllamacpp"), "system": xllamacpp.get_system_info()}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(own.listening_address, line)), flush=True)


if __name__ == "__main__":
    main()
