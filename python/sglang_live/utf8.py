"""Text of the command line and of libraries' files where the locale knows ASCII alone."""

import codecs
import locale
import os
import sys


def start_in_utf8_mode() -> None:
    """Start this program again in Python's UTF-8 mode, in a locale such as C that is ASCII alone.

    Python does so by itself unless PYTHONUTF8 or PYTHONCOERCECLOCALE forbids it. Arguments, names
    of files and what child processes read would be strings that cannot be sent or encoded.
    """
    if codecs.lookup(locale.getencoding()).name != "ascii" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
