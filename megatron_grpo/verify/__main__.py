"""python -m megatron_grpo.verify"""

import sys

from .command import main

sys.exit(main())
