"""Codes to mel and sound by flow matching, as CosyVoice does it.

Here is what a talker has to know of the chunks without torch.
"""

# Codes to which attention is cut, and of the longest chunk. A talker that paused with less than the
# longest one ahead of its listener would not be heard again: they are its chunk_frames.
CHUNK, LONGEST_CHUNK = 25, 100
