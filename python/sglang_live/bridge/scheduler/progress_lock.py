"""tqdm's lock among processes: not wanted, because nothing would remove it."""


def forgo_progress_lock() -> None:
    """Let tqdm do with its lock among threads; SGLang shows progress when it loads a model.

    Where processes are spawned the other one is a semaphore with a name in shared memory, and a
    stage is ended with the process that would remove it. Lines of two processes' bars may mix.
    """
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None
