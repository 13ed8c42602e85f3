"""python -m megatron_grpo.verify"""

import os
import sys

from .command import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
# A rank that failed must not wait in a destructor for peers that are still in a collective.
os._exit(code) if code else sys.exit(0)
