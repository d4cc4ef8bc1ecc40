"""One thread unless a test asks for more: on tiny tensors, waiting threads cost more than the work.

Set before torch is imported, and inherited by the processes that tests start.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
