"""What vLLM's core imports before it does anything: loaded once, in the process that it is forked from.

No error leaves this module. Python's fork server passes over an ImportError without a word, and any other ends it, so
that whoever starts a process learns of a closed connection and not of the cause. A fork imports what is missing here
itself, and fails where vLLM says why.

Python's collector is off in the server, where it would walk all that is imported again and again, and on in the forks:
what was frozen before they were made is not walked there either, and stays in pages that all share.
"""

import contextlib
import gc
import logging
import os

from gymloop import compat


def _load() -> None:
    compat.skip_docstrings()
    import vllm.v1.engine.core
    from vllm.platforms import current_platform

    import gymloop.generation.vllm.extension  # noqa: F401

    if current_platform.is_cuda():
        import vllm.v1.worker.gpu_worker  # noqa: F401
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()  # it looks for the place of the title while the environment is where it began


gc.disable()
os.register_at_fork(after_in_child=gc.enable)
try:
    _load()
except (Exception, SystemExit):  # the process must live; the traceback is told, and the forks meet the error again
    logging.getLogger(__name__).warning(
        "vLLM's modules could not be loaded ahead of its processes, which try it themselves", exc_info=True
    )
gc.freeze()
