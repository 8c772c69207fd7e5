"""A process may have as many sockets and files open as its user is allowed, not as few as its shell began with.

Shells mostly start processes with 1,024 descriptors. A thousand rollouts at once need two sockets each.
"""

from __future__ import annotations

import resource


def allow_descriptors() -> int:
    """Raise this process's soft limit of open descriptors to its hard limit; safe to call again.

    Returns:
        How many may be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a kernel may bound it lower than it says
        return soft
    return hard
