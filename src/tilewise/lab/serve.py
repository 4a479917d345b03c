"""Serves the lab's page on this machine: `tilewise lab`. Nothing on it is asked of a network."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).with_name("app.py")


def serve(port: int, *, browser: bool, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: of 127.0.0.1; 0 takes a free one.
        browser: open the page there when it is ready.
        tell: is given the address.

    Raises:
        ValueError: marimo is not installed, or the port is not free.
    """
    if find_spec("marimo") is None:
        raise ValueError(
            "the lab's page needs marimo: pip install 'tilewise[lab]'. In a terminal, tilewise count, step, break and "
            "measure show the same without it"
        )
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise ValueError(f"port {port} is not to be had ({error.strerror}); --port 0 takes a free one") from error
    import marimo
    import uvicorn

    pages = marimo.create_asgi_app(quiet=True, include_code=False).with_app(path="", root=str(PAGE)).build()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.listen()  # from here on a browser waits for an answer, and is not refused
    tell(address)
    if browser:
        webbrowser.open(address)
    uvicorn.Server(uvicorn.Config(pages, log_level="warning")).run(sockets=[listening])
