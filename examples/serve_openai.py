"""How `specdec serve` is made, to add to it: pip install "specdec-hf[serve]"; see docs/service.md."""

from __future__ import annotations

from typing import Any

import click
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from specdec import SpeculativeModel
from specdec.extensions.server.app import Service
from specdec.extensions.server.running import Server, bound, start_log
from specdec.extensions.server.server_settings import ServerSettings


async def hello(request: Request) -> PlainTextResponse:
    """A route of your own. `request.state.record` is what the log will have of the request."""
    return PlainTextResponse("Ask /v1/chat/completions.")


@click.command()
@click.option("--model", default="gsm-llama", show_default=True, help="Target: name or folder.")
@click.option("--draft", help="Head: name, folder, auto, mtp or lookup.")
@click.option("--name", help="The model's name in the interface (default: as --model).")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True)
@click.option("--api-key", envvar="SPECDEC_API_KEY", help="Ask for this key (default: for none).")
@click.option("--max-body-bytes", default=2**20, show_default=True)
@click.option("--body-seconds", default=30.0, show_default=True, help="A request's body must have arrived then.")
@click.option("--max-num-seqs", default=32, show_default=True, help="Most requests at once.")
@click.option("--max-waiting-requests", default=1024, show_default=True, help="Beyond them 429 is answered.")
@click.option("--allow-lark", is_flag=True, help="Take response_format grammars: they can keep a thread busy for good.")
@click.option("--family", default="auto", show_default=True, help="How the model writes tool calls: docs/tools.md.")
@click.option("--stalled-seconds", default=60.0, show_default=True, help="/health is 503 where a round takes longer.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="For running requests to end after SIGTERM.")
def main(model: str, draft: str | None, name: str | None, host: str, port: int, **own: Any) -> None:
    """Serve a model at http://HOST:PORT/v1."""
    sizes = {option: own.pop(option) for option in ("max_num_seqs", "max_waiting_requests")}
    key = own.pop("api_key")
    settings = ServerSettings(name=name or model, keys=() if key is None else (key,), **own)
    start_log("plain", "info")
    socket = bound(host, port)  # a port that is taken is found out before the model is loaded
    with SpeculativeModel.from_pretrained(model, draft, **sizes) as loaded:
        service = Service(loaded, settings)
        Server(service, service.app([Route("/", hello)]), socket).run()


if __name__ == "__main__":
    main()
