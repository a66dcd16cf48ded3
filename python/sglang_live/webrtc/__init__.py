"""Calls of browsers: transport by aiortc in a process of its own, sound by code of ours.

aiortc is an extra, imported in that process alone. Its own audio path stalls at each lost packet
until sixteen more have come, and then loses them (benchmark/notes/reach.md).
"""
