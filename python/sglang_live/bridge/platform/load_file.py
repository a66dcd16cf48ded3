"""The name of the shared-memory file in which SGLang publishes an engine's load.

SGLang's own name does not show the owner, and its processes are killed: each start of an engine
would leave a file that cannot safely be removed.
"""

import hashlib
import os
from pathlib import Path

# Name prefix of all files that the stage's processes have in shared memory.
SHM_NAMES_ENV = "SGLANG_LIVE_SHM_NAMES"
_SHM_DIR = Path("/dev/shm")


def path_for(ipc_name: str) -> str:
    """Replaces SGLang's load_snapshot.shm_path_for."""
    digest = hashlib.blake2s(ipc_name.encode(), digest_size=8).hexdigest()
    # An engine outside a stage keeps SGLang's prefix.
    return str(_SHM_DIR / f"{os.environ.get(SHM_NAMES_ENV, 'sglang_')}loads-{digest}")
