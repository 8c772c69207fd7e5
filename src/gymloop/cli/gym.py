"""``gymloop gym install|list``: NeMo Gym's servers in an environment of their own.

``install`` prints the environment's folder as the one line on standard output. ``list`` prints what it offers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError
from gymloop.gym.nemo.catalog import Offer, offers
from gymloop.gym.nemo.install import Installation, Wanted, install, installed, run_ray


def run(args: argparse.Namespace) -> int:
    """Do the deed.

    Raises:
        ConfigError: NeMo Gym cannot be installed, or is not.
        InfraError: an installation does not end.
    """
    if args.deed == "install":
        print(install(_wanted(args), lambda line: print(f"gymloop: {line}", file=sys.stderr)).folder)
    else:
        show(_installation(args), args.server)
    return 0


def show(installation: Installation, server: str | None) -> None:
    """Print all servers, a line each, or one with its config files."""
    found = list(offers(installation))
    if server is None:
        print(f"NeMo Gym {installation.version} in {installation.folder}: {len(found)} resources servers")
        width = max((len(offer.name) for offer in found), default=0)
        for offer in found:
            print(f"{offer.name:{width}}  {offer.description or '(no description)'}")
            if offer.needs:
                print(f"{'':{width}}  needs {offer.needs}")
        return
    for offer in found:
        if offer.name == server:
            _show_one(offer)
            return
    raise ConfigError(
        f"NeMo Gym {installation.version} has no {server!r}{did_you_mean(server, [o.name for o in found])}"
    )


def _show_one(offer: Offer) -> None:
    print(f"{offer.name}: {offer.description or '(no description)'}")
    print(f"needs: {offer.needs or 'nothing further'}")
    print(f"agents: {', '.join(offer.agents) or 'none'}")
    print(f"rows that come with it: {offer.rows}")
    for config in offer.configs:
        print(f"config: {config}")


def _wanted(args: argparse.Namespace) -> Wanted:
    return Wanted(args.gym_version, tuple(args.extra), run_ray(), args.python)


def _installation(args: argparse.Namespace) -> Installation:
    if args.folder is not None:
        return Installation.at(Path(args.folder))
    found = installed(_wanted(args))
    if found is None:
        raise ConfigError(
            "NeMo Gym is not installed with these packages; run `gymloop gym install` with the same options"
        )
    return found
