"""RayDirectory: the table of all stages, as the manager has it.

It writes the table to a file for a gateway, which follows that (orchestrator/directory.py) in a
process without Ray: one with Ray would end with the cluster's head.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from sglang_live.cluster.spec import MANAGER, NAMESPACE

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_RETRY_S = 1.0


class RayDirectory:
    def tables(self) -> Iterator[bytes]:
        """Yield the table as JSON, now and whenever it has changed. While there is no manager,
        nothing comes."""
        known = ""
        while True:
            try:
                manager = ray.get_actor(MANAGER, namespace=NAMESPACE)
                version, table = ray.get(manager.table.remote(known), timeout=_TIMEOUT_S)
            except Exception as error:  # of any kind: without this loop the table would be old
                log.warning("directory_unreachable error=%.200r", str(error))
                time.sleep(_RETRY_S)
                continue
            if version != known:
                known = version
                yield table

    def write_to(self, path: Path) -> None:
        """Keep the file like the table. Does not return."""
        for table in self.tables():
            while not _is_written(path, table):
                time.sleep(_RETRY_S)


def _is_written(path: Path, table: bytes) -> bool:
    new = path.with_suffix(".new")
    try:
        new.write_bytes(table)
        os.replace(new, path)
    except OSError as error:  # such as a full disk
        log.error("directory_not_written path=%s error=%s", path, error)
        return False
    return True
