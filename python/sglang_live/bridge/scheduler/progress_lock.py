"""Removal of tqdm's lock among processes, whose semaphore would outlive a stage."""


def forgo_progress_lock() -> None:
    """Make tqdm use its lock among threads only. SGLang shows progress bars when it loads a model.

    With spawned processes the lock among processes is a named semaphore in shared memory. The
    process that would remove it is killed together with the stage. Without that lock, bars of two
    processes may interleave.
    """
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None
