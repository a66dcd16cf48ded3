"""Codes to mel and sound by flow matching: what CosyVoice and Chatterbox share.

Here is what a talker has to know of the chunks without torch.
"""

# Codes to which attention is cut, and of the longest chunk. A talker that paused with less than the
# longest one ahead of its listener would not be heard again: they are its chunk_frames, and those
# of a family whose pieces are decoded whole are the frames of its longest piece.
CHUNK, LONGEST_CHUNK = 25, 100
# Of a recording of a voice.
RECORDING_RATE_HZ = 24_000

# Codes behind a code that its columns need; the flow refuses weights that look further or less far.
AHEAD = 3
