"""Decoders of neural codecs that several families of models share."""

# In the place of every code of the frames behind a stream's last one.
END_CODE = -1
