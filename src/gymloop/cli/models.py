"""``gymloop models fetch ID``: get a model ahead of a run; its folder is the one line on standard output."""

from __future__ import annotations

import argparse

from gymloop.models.resolve import resolve_model


def run(args: argparse.Namespace) -> int:
    """Print the folder.

    Raises:
        ConfigError: the model is not within reach.
    """
    print(resolve_model(args.model))
    return 0
