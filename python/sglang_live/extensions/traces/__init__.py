"""Sends sessions to a collector of traces (OpenTelemetry), from the files of --timeline-dir."""
