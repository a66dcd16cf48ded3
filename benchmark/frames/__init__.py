"""Workload W6: sessions in frame mode, with endless audio."""
