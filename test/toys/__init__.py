"""Model families outside the package, one of each kind, as docs/new_model.md describes them.

All of them count through an alphabet, so that every frame is known. A piece begins at the last
letter of its text.
"""
