"""All faults, one or more for each check: the import of each module adds its own to the list."""

import faulty_processes  # noqa: F401
import faulty_samples  # noqa: F401
import faulty_steps  # noqa: F401
import faulty_validation  # noqa: F401
import faulty_weights  # noqa: F401
from faulty import FAULTS as FAULTS
