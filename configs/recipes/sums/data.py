"""Write the sums into the directory of the first argument."""

import sys
from pathlib import Path

from rl4llm.extensions.quickstart.sums import write_sums

write_sums(Path(sys.argv[1]))
