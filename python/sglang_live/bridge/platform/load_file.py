"""Where SGLang publishes an engine's load: in shared memory, under a name of ours.

Its own name says nothing of its owner, and its processes are killed: each start of an engine would
leave a file that nothing may remove.
"""

import hashlib
import os
from pathlib import Path

# Begin of the names of all files that the stage's processes have in shared memory.
SHM_NAMES_ENV = "SGLANG_LIVE_SHM_NAMES"
_SHM_DIR = Path("/dev/shm")


def path_for(ipc_name: str) -> str:
    """In place of SGLang's load_snapshot.shm_path_for."""
    digest = hashlib.blake2s(ipc_name.encode(), digest_size=8).hexdigest()
    # An engine that no stage started keeps SGLang's way of naming.
    return str(_SHM_DIR / f"{os.environ.get(SHM_NAMES_ENV, 'sglang_')}loads-{digest}")
