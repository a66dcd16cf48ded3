"""How well turn taking is decided: ends of turns, and interruptions while the agent speaks.

`python -m benchmark.turn_taking` is the command; docs/turn_taking.md describes the measure. Readers
(`clips`, `layouts`) make annotated recordings, `components` hear them frame by frame, `scoring`
compares what they decided with the annotation and knows neither.
"""
