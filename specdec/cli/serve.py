"""The command `specdec serve`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from specdec.cli.options import COUNT, added, examples, flag, load_model, load_options_of, model_options, option
from specdec.errors import InvalidInputError
from specdec.values import without_none

_SECONDS = click.FloatRange(0, min_open=True)
_SETTINGS = (
    option("--name", "The model's name in the interface (default: as --model)."),
    option("--max-body-bytes", "Of a request.", COUNT, 2**20),
    option("--body-seconds", "In which a request's body must have arrived.", _SECONDS, 30.0),
    option("--max-grammar-bytes", "Of a grammar, or of the schemas of tools.", COUNT, 2**14),
    option("--max-n", "Most completions of one prompt (n).", COUNT, 16),
    option(
        "--max-requests-per-client",
        "Most completions (prompts times n) of one client at once, by its key if there are several, else by its "
        "address (default: half of --max-num-seqs and --max-waiting-requests).",
        COUNT,
    ),
    flag("--allow-lark", "Take grammars in Lark's syntax, which can keep a thread busy for good."),
    option("--family", "How the model writes tool calls: docs/tools.md.", None, "auto"),
    option("--stalled-seconds", "/ready and /health are 503 where a round takes longer.", _SECONDS, 60.0),
    option("--drain-seconds", "For running requests to end after SIGTERM.", click.FloatRange(0), 30.0),
)


@click.command(
    epilog=examples(
        "specdec serve",
        "specdec serve --model gsm-deepseek --draft mtp -k 3 --api-key secret",
        "specdec serve --model Qwen/Qwen3-8B --draft lookup --max-requests-per-client 8 --log-format json",
    )
)
@option("--host", None, None, "127.0.0.1")
@option("--port", "0: any that is free.", click.IntRange(0, 65535), 8000)
@option(
    "--api-key", "Ask for this key, or for one of several joined by commas (default: none).", envvar="SPECDEC_API_KEY"
)
@option("--trusted-proxy", "Address whose X-Forwarded-For names the client; may be given several times.", multiple=True)
@option("--log-format", "json: an object a line.", click.Choice(["plain", "json"]), "plain")
@option("--log-level", "debug: probes, too.", click.Choice(["debug", "info", "warning", "error"]), "info")
@added(_SETTINGS)
@model_options(changes={"max_waiting_requests": {"default": 1024, "help": "Beyond them 429 is answered."}})
def serve(
    model: str, draft: str, host: str, port: int, api_key: str | None, log_format: str, log_level: str, **options: Any
) -> None:
    """Serve a model at http://HOST:PORT/v1, with OpenAI's interface: docs/service.md.

    The port answers once the model is loaded. SIGTERM lets running requests end.
    """
    try:
        from specdec.extensions.server.app import Service
        from specdec.extensions.server.running import Server, bound, start_log
        from specdec.extensions.server.server_settings import ServerSettings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        needed = 'pip install "specdec-hf[serve]"'
        raise InvalidInputError(f"specdec serve needs {error.name}, which is not installed: {needed}") from None
    keys = api_key.split(",") if api_key is not None else ()
    own = without_none({field.name: options.get(field.name) for field in fields(ServerSettings)})
    settings = ServerSettings(**{"name": model, "keys": keys, **own})
    start_log(log_format, log_level)
    socket = bound(host, port)
    with load_model(model, draft, load_options_of(options)) as loaded:
        service = Service(loaded, settings)
        Server(service, service.app(), socket, options["trusted_proxy"]).run()
