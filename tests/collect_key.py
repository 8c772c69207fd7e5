"""Put a key into the environment of a run; see ``forked``, ``prepare``."""

import os


def put(key: str | None) -> None:
    os.environ.pop("GYMLOOP_API_KEY", None)
    if key is not None:
        os.environ["GYMLOOP_API_KEY"] = key
